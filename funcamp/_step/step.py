"""`TrainStep`: the training step as an object, which makes, moves, evaluates, saves and loads its state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from funcamp import _tree
from funcamp._autograd.loss import Loss
from funcamp._autograd.returned import loss_and_aux
from funcamp._check import Fixed, boolean, one_batch
from funcamp._optim.chain import Chain, group_functions_in, single_parts_in
from funcamp._optim.part import Update
from funcamp._scaler.config import ScalerConfig, check_state_and_config
from funcamp._scaler.skip_step import old_where
from funcamp._scaler.update import decide
from funcamp._step.accumulate import accumulate, micro_batches
from funcamp._step.first_state import Group, consumed_loss, first_state
from funcamp._step.flag_and_norm import flag_and_norm, unscaled_gradients
from funcamp._step.micro_batch import result_function
from funcamp._step.options import Options, chain_of
from funcamp._step.shares import shares_of
from funcamp._step.state import Metrics, TrainState, check_train_state
from funcamp._step.state_dict import export, gather, restore
from funcamp._step.torch_state import from_torch, to_torch
from funcamp._storage.inputs import check_params
from funcamp._storage.params import Params, clone, expand, matrix_or_vector
from funcamp._storage.policy import autocast_of
from funcamp._trace.tracing import compiling
from funcamp._types import StateDict, Tree, name_of


def _is_in_autocast(state: TrainState) -> bool:
    """Return whether a region of the caller casts on the state's device."""
    device_type = state.scaler.scale.device.type
    return device_type != "meta" and torch.is_autocast_enabled(device_type)  # autocast does not know the meta device


def _outside_autocast(state: TrainState) -> contextlib.AbstractContextManager[object]:
    """Context manager: leave a region of the caller, if there is one."""
    if _is_in_autocast(state):
        return torch.autocast(state.scaler.scale.device.type, enabled=False)
    return contextlib.nullcontext()


def _observed(observe: Mapping[str, Callable[[Tree], Tree]], gradients: Params) -> dict[str, Tree]:
    """Return the results of the observe functions on the unscaled gradients, in the parameters' own tree."""
    if not observe:
        return {}
    tree = expand(gradients)
    results = {name: function(tree) for name, function in observe.items()}
    for index, leaf in enumerate(_tree.leaves(results)):
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"step: observe{_tree.path_of(results, index)} must return tensors; got {_tree.describe(leaf)}"
            )
    copies: dict[str, Tree] = clone(results)
    return copies


class TrainStep(Fixed):
    """A pure step `(state, batch) -> (state, metrics)`; made by `make_train_step`."""

    loss_fn: Loss
    optimizer: Any
    config: ScalerConfig
    options: Options
    chain: Chain
    group: Group
    _instead = "Call make_train_step with another {name}: the new step continues from the same state"

    def __init__(self, loss_fn: Loss, optimizer: object, config: ScalerConfig, options: Options) -> None:
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.config = config
        self.options = options
        self._last_checked: object = None
        """The layout and the dtypes of the parameters that were checked last."""
        #: The optimizer, with what clips before it and averages after it.
        self.chain = chain_of(optimizer, options)
        #: Gives parameters the labels of their groups, unless `init` gets another function. The optimizer has at most
        #: one (`make_train_step`).
        self.group = next(iter(group_functions_in(optimizer)), matrix_or_vector)

    def python_parts(self) -> dict[str, object]:
        """Return the objects whose Python the step runs, by name: `jit` looks there for state besides its own."""
        parts = self.loss_fn.python_parts()
        if self.options.weight is not None:
            parts["weight"] = self.options.weight
        parts |= {f"observe[{name!r}]": function for name, function in self.options.observe.items()}
        parts |= {f"optimizer[{index}]": part for index, part in enumerate(single_parts_in(self.chain))}
        return parts | {"rule": self.config.rule}

    def __repr__(self) -> str:
        return f"make_train_step({self.loss_fn!r}, {self.optimizer!r}, policy={name_of(self.options.policy)})"

    def __call__(self, state: TrainState, batch: Tree) -> tuple[TrainState, Metrics]:
        """Take one step. Pure; safe under torch.compile(fullgraph=True); no sync.

        Args:
            state: from `init` or the last call.
            batch: a pytree, passed to the loss. With accumulate > 1 the first dimension of every tensor is the
                micro-batches: accumulate of them, or fewer in a last, partial window.

        Raises:
            TypeError: state is not a `TrainState`; the loss is not a floating-point tensor, or returns something else
                than the options say; weight returns neither a number nor a tensor.
            ValueError: the loss or a weight has a shape other than (); a weight is a negative number, or one
                that is not finite; the number of micro-batches is 0, above accumulate, or differs between tensors.
        """
        state = self.check_call("step", state, batch)
        if not torch.compiler.is_dynamo_compiling():
            self.loss_fn.begin_step()
        precision = self._precision_of_loss(state)
        with _outside_autocast(state):  # as the backward pass and the optimizer of torch's loop are
            after, metrics = self._take(state, batch, precision)
        if not compiling() and _is_in_autocast(state):
            torch.clear_autocast_cache()  # torch would keep this step's casts until the caller's region ends
        return after, metrics

    def _take(self, state: TrainState, batch: Tree, precision: torch.dtype) -> tuple[TrainState, Metrics]:
        """Return the state after a step and its metrics; read it from top to bottom.

        Args:
            state: a state with its parameters as this step stores them.
            batch: one batch, as the user passed it.
            precision: the dtype of the autocast in which the loss runs; float32 for none.
        """
        loss_fn = self.loss_fn
        options = self.options
        parallel = options.parallel
        device = state.scaler.scale.device
        batch = _tree.plain(batch)

        # What the loss gets: full parameters, in their own dtype. Autocast casts those of float32 at their use.
        params_of_loss = state.params.gathered()
        tape = loss_fn.tape(device)

        # The scaled gradients, the loss, its buffers and the records of the tape.
        pieces = [batch] if options.accumulate == 1 else micro_batches(batch, options.accumulate)
        shares = shares_of(options.weight, pieces, parallel.size, parallel.sum_of_weights, device)
        result_of = result_function(self, state, params_of_loss, tape, shares, precision)
        if options.accumulate == 1:
            result = result_of(state.buffers, batch, None)
        else:
            result = accumulate(result_of, params_of_loss, state.buffers, tape, pieces, shares)

        # The sum over ranks; the flag and the norm by one reading of the gradients. An overflow of one rank reaches the
        # others in the sum of the gradients; with DTensors in that of the flags over their mesh.
        # Nothing looks at the loss: an infinite loss whose gradients are finite is applied.
        result = parallel.summed(result, shares.own, state)
        scaler, norm = flag_and_norm(state.scaler, result.gradients)

        # Clipping, the optimizer and the average.
        gradients = unscaled_gradients(state.scaler, result.gradients)
        changed, opt_state = self.chain.transform(Update(state.params, gradients, norm), state.opt_state)

        # The only skip.
        skips = scaler.found_inf != 0
        buffers_if_skipped = result.buffers if loss_fn.keep_buffers else state.buffers
        params, opt_state, buffers = old_where(
            "step",
            skips,
            new=(changed.params, opt_state, result.buffers),
            old=(state.params, state.opt_state, buffers_if_skipped),
        )
        if loss_fn.keep_buffers:
            # `old_where` has returned these as they are, being old and new at once; one may be a tensor of the batch.
            buffers = clone(buffers)

        # Counts and the scale, which move also when the step is skipped.
        is_skipped = skips.long()
        calls = state.step + 1
        skipped = state.skipped + is_skipped
        decision = decide(scaler, self.config)
        after = TrainState(
            step=calls,
            skipped=skipped,
            consecutive_skips=(state.consecutive_skips + 1) * is_skipped,
            params=params,
            opt_state=opt_state,
            scaler=decision.next_state(),
            buffers=buffers,
        )
        # Copies of what is in a state: the next step may be donated the state, and would overwrite these.
        metrics = Metrics(
            loss=result.loss,
            grad_norm=norm.float(),
            scale=state.scaler.scale.clone(),
            lr=self.chain.learning_rate(state.opt_state),
            found_inf=scaler.found_inf,
            exhausted=decision.exhausted().float(),
            saturated=decision.saturated().float(),
            applied=calls - skipped,
            skipped=skipped.clone(),
            consecutive_skips=after.consecutive_skips.clone(),
            observed=_observed(options.observe, gradients),
            records=loss_fn.collected(result.records),
            aux=result.aux,
        )
        return after, metrics

    def _precision_of_loss(self, state: TrainState) -> torch.dtype:
        """Return the dtype of the autocast in which the loss runs; float32 for none.

        It is the policy's, also inside of a caller's region; without a policy it is that of the region.
        """
        policy = self.options.policy
        if policy == torch.float32 and _is_in_autocast(state):
            return torch.get_autocast_dtype(state.scaler.scale.device.type)
        return policy

    @torch.inference_mode(False)  # autograd rejects inference tensors outside inference mode
    def init(
        self,
        params: Tree = None,
        buffers: dict[str, Tensor] | None = None,
        *,
        flat: bool = True,
        group: Callable[[str, Tensor], str] | None = None,
        consume: bool = False,
    ) -> TrainState:
        """Make the state before the first step.

        Copies every value: the state shares no memory with params or a module, unless consume is set. The scaler's
        state is on the device of the first parameter. Tensors are ordinary ones also under torch.inference_mode. No
        sync.

        Args:
            params: a pytree of floating-point or complex tensors, or `Params`; by default the module's, if the
                loss is of `module_loss`. `Params` are taken apart and stored anew.
            buffers: tensors by name; by default the module's.
            flat: store the parameters in a few 1-D tensors, so that the number of kernel launches does not depend on
                the number of tensors; False stores each tensor by itself.
            group: the groups of flat storage, as in `ravel`; by default those of the optimizer, or matrices and
                vectors.
            consume: let the module share the state's memory, so that each value is in memory once when the state is
                made: its trainable parameters and its buffers become views of the state's tensors, and remain the same
                objects. Writes into the module change this state, until the first eager step or until the module gets
                other memory (`Module.to`, `load_state_dict(assign=True)`). When the module follows the steps:
                docs/step.md, "Where the parameters are".

        Raises:
            TypeError: params is missing; a leaf is an integer tensor, a sparse tensor or not a tensor; buffers is not a
                dict of tensors; flat or consume is not a bool; group is not callable; consume is set for a loss that is
                not of `module_loss`, or for a module with DTensors, other tensor subclasses or scripted layers.
            ValueError: params has no tensor, or not the names of the module; buffers are given for a loss without, or
                with other names than the module's; flat is False with a group, or for a sharded state; consume is set
                with params or buffers, or for a sharded state.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> state = step.init({"w": torch.ones(2)})
            >>> state.step, state.params.tree()
            (tensor(0), {'w': tensor([1., 1.])})
            >>> model = torch.nn.Linear(2, 1)
            >>> step = make_train_step(module_loss(model, torch.nn.functional.mse_loss), stateless(torch.optim.SGD))
            >>> state = step.init(consume=True)
            >>> model.weight.data_ptr() == state.params["weight"].data_ptr()
            True
        """
        return first_state(self, params, buffers, flat=flat, group=group, consume=consume)

    def loss(self, state: TrainState, batch: Tree, *, training: bool = False) -> Tensor:
        """Return the loss of a batch without a gradient, without dropout and without writing anything.

        For validation. Evaluates one batch without micro-batches, in the precision of the step. A loss of `module_loss`
        is evaluated in eval mode: dropout off, BatchNorm with its running statistics. The module's training flags are
        set during the call and restored; another thread that calls the module meanwhile sees them. Any other loss is
        called as it is: set the flags of its modules yourself. Further results of the loss (buffers, aux) are dropped;
        for these call `step.loss_fn` on `compute_params(state)`. The loss is that of `state.params`; `evaluating` takes
        the average instead if there is one: `step.loss(state._replace(params=state.ema), batch)` is its loss. With a
        sharded state this is a collective: call it on every rank; each rank gets the loss of its own batch. No sync.

        Args:
            state: from `init` or a step.
            batch: as for the step, but one micro-batch.
            training: keep the module's training flags: the loss as the step computes it, with dropout.

        Returns:
            The loss, unscaled, shape ().

        Raises:
            TypeError: state is not a `TrainState`, or training not a bool; the loss is not a floating-point tensor, or
                not in a pair although it has buffers or aux.
            ValueError: state is sharded over other ranks.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> step.loss(step.init({"w": torch.ones(2)}), torch.tensor([1.0, 2.0]))
            tensor(3.)
        """
        state = self.check_call("loss", state, batch)
        keeps_training_flags = boolean("loss", "training", training)
        mode = contextlib.nullcontext() if keeps_training_flags else self.loss_fn.eval_mode()
        precision = self._precision_of_loss(state)
        with torch.no_grad(), mode, _outside_autocast(state):
            params = state.params.gathered().tree()
            taps = self.loss_fn.tape(state.scaler.scale.device)
            arguments = self.loss_fn.arguments(params, taps, state.buffers, state.scaler, _tree.plain(batch))
            with autocast_of(precision, state.scaler.scale.device.type):
                returned = self.loss_fn(*arguments)
        returns_pair = self.loss_fn.has_buffers or self.loss_fn.has_aux
        loss, _ = loss_and_aux("loss", returned, returns_pair)
        return loss

    @contextlib.contextmanager
    def evaluating(self, state: TrainState, *, average: bool = True) -> Iterator[torch.nn.Module]:
        """Context manager: the module with the values to evaluate, in eval mode and without gradients.

        The values are copies of the average (`ema_decay`, `average`) if the state has one; those that a schedule-free
        optimizer evaluates with; else the state's parameters; and the state's buffers. Call the module, take its
        `state_dict()`, copy or save it in there. Afterwards it is as before: its tensors, the memory that they share,
        and the training flag of each submodule. The forward pass is in float32: add `step.autocast(state)` for the
        precision of the policy. For gradients with respect to an input, enter `torch.enable_grad()`. A step of the
        module in there is an error; another thread's waits. With a sharded state this is a collective. No sync.

        Args:
            state: from `init` or a step.
            average: False for the parameters themselves, as `loss` takes them, if the state has an average of them.

        Yields:
            The module of which `module_loss` was made.

        Raises:
            TypeError: state is not a `TrainState`, or the loss is not of `module_loss`.
            ValueError: the module has got other parameters or buffers since the loss was made.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Dropout())
            >>> step = make_train_step(module_loss(model, torch.nn.functional.mse_loss), stateless(torch.optim.SGD))
            >>> with step.evaluating(step.init()) as trained:
            ...     trained is model, trained.training, trained(torch.ones(3, 2)).requires_grad
            (True, False, False)
            >>> model.training
            True
        """
        state = gather("evaluating", self._checked("evaluating", state))
        params = state.ema
        if not (boolean("evaluating", "average", average) and isinstance(params, Params)):
            params = self.chain.evaluation_params(state.params, state.opt_state)
        with torch.no_grad(), self.loss_fn.with_values(params, state.buffers) as model:
            yield model

    def check_call(self, call: str, state: object, batch: Tree) -> TrainState:
        """Return the state; raise if a call did not get a state and one batch."""
        checked = self._checked(call, state)
        check_state_and_config(call, checked.scaler, self.config)
        one_batch(call, batch)
        return checked

    def _checked(self, call: str, state: object) -> TrainState:
        """Return the state; raise if it is none, or if its parameters are not those of this step's loss.

        Also if they are not stored as the step has them. Parameters like those of the last call are not checked again.
        """
        checked = check_train_state(call, "state", state)
        params = checked.params
        self.options.parallel.check(call, params)
        about = params.layout, [None if group is None else (group.dtype, group.shape) for group in params.groups]
        # torch.compile would guard what is known, and compile anew for it.
        if torch.compiler.is_dynamo_compiling() or self._last_checked != about:
            check_params(call, params, self.loss_fn.param_shapes)
            if not compiling():
                self._last_checked = about
        return checked

    def compute_params(self, state: TrainState) -> Tree:
        """Return the parameters by name as the loss gets them, in their own dtype.

        For a forward pass outside the loss, under `autocast`: another network's turn, a target network, acting.
        Returns detached copies, which later steps do not change. With a sharded state this is a collective: call it on
        every rank. No sync.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD), policy="bfloat16")
            >>> step.compute_params(step.init({"w": torch.ones(1, 2)}))
            {'w': tensor([[1., 1.]])}
        """
        state = self._checked("compute_params", state)
        params = state.params.gathered()
        return clone(params.tree())  # the next donated step would overwrite the state's own

    def autocast(self, state: TrainState) -> contextlib.AbstractContextManager[object]:
        """Return a region with the policy's autocast, for a forward pass outside the loss.

        With `compute_params` it computes there as the loss does, without naming the precision again: a target network,
        acting, the other network of a GAN. It replaces a caller's region. Without a policy, or with float32, a caller's
        region applies, as it does to the loss. It does not switch gradients off; those parameters require none. No
        sync.

        Args:
            state: whose device the region is for.

        Raises:
            TypeError: state is not a `TrainState`.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> loss_fn = module_loss(model, torch.nn.functional.mse_loss)
            >>> step = make_train_step(loss_fn, stateless(torch.optim.SGD), policy="bfloat16")
            >>> state = step.init()
            >>> with step.autocast(state):
            ...     out = torch.func.functional_call(model, step.compute_params(state), torch.ones(3, 2))
            >>> out.dtype
            torch.bfloat16
        """
        check_train_state("autocast", "state", state)
        return autocast_of(self.options.policy, state.scaler.scale.device.type)

    def state_dict(self, state: TrainState) -> dict[str, Tensor]:
        """Return every tensor of a state by a dotted name, for torch.save.

        Names start with `params.`, `opt_state.` and so on; a parameter's goes on with the module's own name. The names
        are the same whether the parameters are flat or not. Tensors are copies. With a sharded state this is a
        collective: call it on every rank; it gathers the full state, as `distributed.gather_state` does. No sync.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> list(step.state_dict(step.init({"w": torch.ones(2)})))[:4]
            ['step', 'skipped', 'consecutive_skips', 'params.w']
        """
        return export("state_dict", state)

    def load_state_dict(self, saved: dict[str, Tensor], like: TrainState, *, consume: bool = False) -> TrainState:
        """Return the state saved by `state_dict`, laid out as `like` (from `init`), on its devices.

        To go on with other parameters, fill in what is missing and leave out what is gone: `fresh =
        step.state_dict(like)`, then `{name: saved.get(name, fresh[name]) for name in fresh}`. Call it on
        every rank; it does no collective. Syncs: reads the scale and the counts.

        Args:
            saved: what `state_dict` returned.
            like: a state of this step; not changed.
            consume: let the module share the memory of the returned state, as in `init`. A module that shared like's
                memory (`init(consume=True)`) would otherwise keep like's values.

        Raises:
            TypeError: like is not a `TrainState`, or saved not a dict; consume as in `init`.
            ValueError: a name is missing or unknown; a tensor has another shape or dtype than like's; like has other
                parameters than this step's loss; the scale is not above 0; parameters in one group of flat storage,
                which has one step count, differ in theirs, because some were frozen or added later: make like with
                `init(flat=False)`.

        Example:
            >>> step = make_train_step(lambda p, x: (p["w"] * x).sum(), stateless(torch.optim.SGD))
            >>> state = step.init({"w": torch.ones(2)})
            >>> saved = step.state_dict(state)
            >>> step.load_state_dict(saved, like=state).params.tree()
            {'w': tensor([1., 1.])}
        """
        call = "load_state_dict"
        return self._adopted(call, restore(call, saved, like, self.options.parallel), consume)

    @torch.inference_mode(False)  # as `init`
    def _adopted(self, call: str, state: TrainState, consume: bool) -> TrainState:
        """Return a loaded state; with consume, its memory is the module's."""
        check_params(call, state.params, self.loss_fn.param_shapes)
        consuming_loss = consumed_loss(call, self, None, None, consume)
        if consuming_loss is None:
            self.loss_fn.state_moves()  # the module has the values of before
        else:
            consuming_loss.adopt(state.params, state.buffers)
            consuming_loss.state_was_made(shares_memory=True)
        return state

    def to_torch(self, state: TrainState) -> StateDict:
        """Return the state_dicts with which a torch loop continues: its module, optimizer and scaler.

        torch's optimizer must be created with `model.parameters()`, frozen ones included. For `by_group` it has one
        parameter group per label, in their order; if the classes differ, there is one optimizer per label. With a
        sharded state this is a collective. Syncs: reads the state.

        Args:
            state: the state after a step.

        Returns:
            "model", "optimizer" (by label if classes differ) and "scaler", each for torch's `load_state_dict`. foreach,
            fused and capturable are the step's or torch's defaults. The average of `ema_decay` is left out.

        Raises:
            TypeError: an optimizer was not made by `stateless`, or its class is not torch.optim's: its state is saved
                by `state_dict`.
            ValueError: state is of another model or another optimizer.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> loss_fn = module_loss(model, torch.nn.functional.mse_loss)
            >>> step = make_train_step(loss_fn, stateless(torch.optim.AdamW))
            >>> saved = step.to_torch(step.init())
            >>> model.load_state_dict(saved["model"])
            <All keys matched successfully>
            >>> torch.optim.AdamW(model.parameters()).load_state_dict(saved["optimizer"])
            >>> torch.amp.GradScaler("cpu").load_state_dict(saved["scaler"])
        """
        return to_torch(self, state)

    def from_torch(
        self,
        like: TrainState,
        *,
        optimizer: Mapping[str, StateDict] | StateDict | None = None,
        scaler: StateDict | None = None,
        steps: int | None = None,
        consume: bool = False,
    ) -> TrainState:
        """Return the state that continues a torch loop, from the state_dicts of its optimizer and its scaler.

        Parameters and buffers are taken from like: load the module first, `model.load_state_dict(...)`, then call
        `init`. Syncs: reads the counts.

        Args:
            like: from `init`; not changed.
            optimizer: `torch.optim.Optimizer.state_dict()` of the step's class; None to start anew. For `by_group`, as
                `to_torch` returns it. Its parameters are in the module's order, or their names are in its groups as
                "param_names": an optimizer created with `named_parameters()` saves them.
            scaler: `torch.amp.GradScaler.state_dict()`; None to start anew.
            steps: number of applied steps, for schedules, also of an optimizer that starts anew; by default the
                optimizer's count (SGD has none).
            consume: let the module share the memory of the returned state, as in `init`.

        Raises:
            TypeError: like is not a `TrainState`; optimizer is not a state_dict, or the step's was not made by
                `stateless` from a class of torch.optim; steps is not an integer.
            ValueError: optimizer keeps other entries than the step's class, or has other numbers (lr, betas) or
                parameters than the step; scaler has other constants; steps are missing and needed, or negative.

        Example:
            >>> model = torch.nn.Linear(2, 1)
            >>> adamw = torch.optim.AdamW(model.parameters(), lr=0.1)
            >>> model(torch.ones(2)).backward()
            >>> adamw.step()
            >>> loss_fn = module_loss(model, torch.nn.functional.mse_loss)
            >>> step = make_train_step(loss_fn, stateless(torch.optim.AdamW, lr=0.1))
            >>> step.from_torch(step.init(), optimizer=adamw.state_dict()).opt_state.applied
            tensor(1)
        """
        state = from_torch(self, like, optimizer, scaler, steps)
        return self._adopted("from_torch", state, consume)
