"""Right loops of other forms, in which the auditor must find nothing."""
