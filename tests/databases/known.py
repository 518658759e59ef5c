"""What `jit` refuses of torch's samples, and what differs, each with its reason. The lists are exact.

An outcome is followed by the number of samples. An entry whose operation now works, or fails otherwise, fails the test.
"""

from __future__ import annotations

#: Results are memory as it was: only dtype and shape are compared.
UNINITIALIZED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

_VALUE, _SHAPE = "refused: reads a value", "refused: takes a shape from values"
_CASTS = "refused: casts inside"

#: torch reads a value on the host, or returns one.
_READS_A_VALUE: dict[str, dict[str, int]] = {
    "allclose": {_VALUE: 9},
    "equal": {_VALUE: 9},
    "item": {_VALUE: 9},
    # They check that the number of observations is positive.
    "corrcoef": {_VALUE: 9},
    "cov": {_VALUE: 9},
    # It checks that the windows add up to more than zero; a call for real numbers does not get that far.
    "istft": {_VALUE: 1},
    # A start, or indices to split at, in a tensor.
    "narrow": {_VALUE: 4},
    "tensor_split": {_VALUE: 9},
    # It looks for the largest class unless their number is given.
    "nn.functional.one_hot": {_VALUE: 1},
    # The derivative of complex numbers checks that the loss does not depend on the phase.
    "linalg.svd": {_VALUE: 1},
    "svd": {_VALUE: 1},
}

#: torch has no rule for the shapes of results that no values are known of.
_TAKES_A_SHAPE: dict[str, dict[str, int]] = {
    "linalg.lstsq": {_SHAPE: 9},
    "linalg.lstsq.grad_oriented": {_SHAPE: 9},
    "nn.functional.ctc_loss": {_SHAPE: 8},
}

#: A trace does not know how many values it has.
_MAKES_SPARSE = {"to_sparse": {"refused: makes a sparse tensor": 7}}

#: Under autocast, which casts inside of torch's kernels.
_CASTS_INSIDE: dict[str, dict[str, int]] = {
    "linalg.pinv": {_CASTS: 2},
    "linalg.pinv.hermitian": {_CASTS: 2},
    "nn.functional.bilinear": {_CASTS: 4},
}

#: torch differentiates by another formula if a tensor has no values, as in a trace. Both are right; they round
#: differently. Of `masked_fill` it adds zeros between the numbers that count, and of `prod` it does not divide by the
#: input, which may have a zero.
_OTHER_DERIVATIVE: dict[str, dict[str, int]] = {
    "masked_fill": {"differs: gradients": 3},
    "prod": {"differs: new state": 4, "differs: gradients": 1},
}

KNOWN = _READS_A_VALUE | _TAKES_A_SHAPE | _MAKES_SPARSE | _CASTS_INSIDE | _OTHER_DERIVATIVE

#: Of torch's modules, with "eager" or "jit".
KNOWN_MODULES: dict[str, dict[str, int]] = {
    # As the operation.
    "nn.CTCLoss jit": {f"jit {_SHAPE}": 12},
    "nn.Bilinear jit": {f"jit {_CASTS}": 4},
    # With momentum=None: their count of batches.
    **{f"nn.BatchNorm{dims}d jit": {f"jit {_VALUE}": 2} for dims in (1, 2, 3)},
}

#: Samples that Inductor cannot compile: an index of shape () that it reads on the host, complex results.
NOT_COMPILED = {
    "take 2",
    # A padding of one number in a tuple.
    *("nn.functional.avg_pool2d 3", "nn.functional.avg_pool2d 4"),
    *("linalg.eig 1", "linalg.eig 2", "linalg.eigvals 1", "linalg.eigvals 2"),
    # Inductor loses the order of draws where one of no elements is between them.
    "rand_like 2",
}
#: What reads memory in its order, which a compiler chooses: of `view_copy` it raises.
READS_MEMORY = {"as_strided_copy 0", "as_strided_copy 1", "resize_as_ 0", "resize_as_ 1", "view_copy 0", "view_copy 1"}
