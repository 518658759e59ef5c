"""The loops are scripts: a test runs them, and nothing imports them."""

collect_ignore_glob = ["loops/*", "right_loops/*"]
