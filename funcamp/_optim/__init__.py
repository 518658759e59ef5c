"""Optimizers as pure functions: torch.optim's and others' (`stateless`), schedules, and chains of parts.

A chain is `chain.py`, with a file for each kind of part: `part.py` has the protocol; then `clip_parts.py`, `clip.py`,
`average_part.py` and `ema.py`, `every_part.py`. `by_group.py` has one optimizer for each label. `schedule.py` runs a
scheduler of torch, whose values become a `table.py`.

All other files are `stateless`: they turn a class of `torch.optim.Optimizer` into functions of tensors. Its own `step`
runs in an instance that lives for one step, on clones, without a read on the host. Words: `decisions.py` defines
question, answer and path; `class_state.py` entry and form.

A step, from the outside in:

    stateless.py          trees in, trees out; Dynamo does not trace what is inside
    class_step.py         `ClassStep`: the step along every path, selected; the first step, if it has another formula
    decisions.py          one run for each way through the branches
    run.py                one run: an instance, the state put in, `step`, the state read
    pure_calls.py         torch's calls in it, made pure: what a class reads, and the numbers that it gives torch
    instance.py           the instance; it puts the state in and observes what changes
    instance_state.py     what an instance keeps, as Python's objects; containers.py: lists and dicts among them
    class_state.py        that as tensors, and back
    number.py             a tensor that the class takes for a Python number
    python_names.py       `math`, `min`, `float` and others on such numbers; compiled_parts.py: what torch.compile made
    scalar_arguments.py   torch's functions on such numbers
    hyperparameters.py    tensors and schedules for numbers
    first_state.py        the state before the first step

The trial, when `stateless` is called: `traits.py` is the list of what is tried and refused, in order. It learns from
`record.py`, a short loop of the class; `trial.py` has the numbers, `dataflow.py` follows which tensor depends on which
parameter, and `modes.py` leaves the caller's modes. `long_trial.py`, at last, compares with a long loop. When a state
is made, `kinds.py` tries what the trial did not have: other dtypes, other shapes; `positions.py` asks whether a
parameter may step without the others.

Where a number that a class counts becomes state:

    discovery             record.changing_in: in a plain loop; changing_numbers.py: on the other paths
    its entry             class_state.form_of puts an `Entry` in its place; find_form.py calls it
    after a step          class_state.entries_of takes it out as a tensor of shape ()
    before the next       class_state.filled puts it in as a `Number`

Where a branch is run both ways:

    the question          number.Number._compare, for a number; pure_calls.PureCalls._python_value, for a tensor
    its answer            decisions.Decisions.ask
    the runs              decisions.along_paths
    the selection         class_step._select_stepped

Where a class or an argument is refused, and the words to search for:

    wrong_arguments.py    "must be a subclass", "parameters must not be given", "which sets the numbers of"
    arguments.py          "has no hyperparameter", "must be False or None", "its step needs", "chooses the algorithm",
                          "refuses its hyperparameters"; `impure` writes "cannot be made pure: " before most reasons
    instance.py           "it sorts its parameters into", "its constructor registers hooks"
    record.py             "its step fails on a few numbers", "holds values of the parameters",
                          "it keeps an optimizer as", "where it is not followed": what a step changes
    tensor_hyperparameters.py
                          "must be a number, because": the constructor or a step uses the value in Python
    long_trial.py         "come to other numbers than its own", "also uses the number", "reads its value in Python"
    kinds.py              "for a parameter of shape", "its steps as a function fail"
    number.py             "reads a value", "copies or saves it", "compares it with a", "computes with it and a"
    python_names.py       "it reads time."
    instance_state.py     "must have parameters, numbers or text as keys"
    pure_calls.py         "reads a tensor in Python", "sets requires_grad", "a number that changes in training; call"
    changing_numbers.py   "fails on tensors without values", "is no number after every step"
    class_state.py        "must have the same entries", "or stay what it is"
    find_form.py          "its state grows"
    class_step.py         "on one path of its step a tensor of its state"
    decisions.py          "its step branches on numbers that change in training": more than 16 paths
    class_code.py         "may catch", "ask with `if` instead": what no trial shows
    independence.py       "draws random numbers, and branches", "to a function in C"
    traits.py             "some step of it changes", "keeps one tensor as"
"""
