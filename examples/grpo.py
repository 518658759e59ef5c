"""Train a small policy by GRPO in float16: rollout, advantages and updates are one compiled, captured step.

    python examples/grpo.py                      learns to sort four digits: two minutes on a CPU
    python examples/grpo.py --dtype bfloat16     or float32
    python examples/grpo.py --rollout trainer    samples with the trainer's own forward pass: a gap of 0

Watch the gap: the mean difference between the log-probabilities of rollout and trainer. By default the rollout runs as
in an inference engine: a KV cache, one token at a time, everything in 16 bits; the trainer computes under autocast.
In float16 the gap is about an eighth of bfloat16's. Now and then the scale has grown too high: an update is skipped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import funcamp

DIGITS, LENGTH = 8, 4
WIDTH, LAYERS, HEADS = 32, 2, 4
PROMPTS, GROUP, UPDATES = 16, 8, 2
CLIP, KL, LR = 0.2, 0.002, 3e-3
DTYPES, ROLLOUTS = ("float16", "bfloat16", "float32"), ("engine", "trainer")
Cache = list[tuple[Tensor, Tensor]]
Forward = Callable[..., tuple[Tensor, Cache]]


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """float of shape (batch, time, width) to the same, and the keys and values so far."""
        batch, time, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, time, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x)))), (k, v)


class Policy(nn.Module):
    """The next digit after a prompt and the answer so far."""

    def __init__(self) -> None:
        super().__init__()
        self.digits, self.places = nn.Embedding(DIGITS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> tuple[Tensor, Cache]:
        """int64 of shape (batch, time), after those in the cache, to logits (batch, time, digits) and the new cache."""
        before: Any = [None] * LAYERS if cache is None else cache
        start = 0 if cache is None else cache[0][0].shape[2]
        x = self.digits(tokens) + self.places.weight[start : start + tokens.shape[1]]
        after = []
        for block, past in zip(self.blocks, before):
            x, pair = block(x, past)
            after.append(pair)
        return self.head(self.norm(x)), after


def log_prob(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probability of each token, float32."""
    return logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0]


def inputs_of(prompts: Tensor, answer: Tensor) -> Tensor:
    """Return what the policy sees if it computes a complete answer at once."""
    return torch.cat([prompts, answer[:, :-1]], 1)


def by_engine(forward: Forward, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw answers digit by digit with a KV cache; return them and their log-probabilities."""
    logits, cache = forward(prompts)
    answer: list[Tensor] = []
    old: list[Tensor] = []
    for place in range(LENGTH):
        if place:
            logits, cache = forward(answer[-1][:, None], cache)
        answer.append((logits[:, -1].float() + noise[:, place]).argmax(-1))
        old.append(log_prob(logits[:, -1], answer[-1]))
    return torch.stack(answer, 1), torch.stack(old, 1)


def by_trainer(forward: Forward, prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Draw answers with the forward pass that the trainer differentiates, of the same shape for every digit."""
    answer = torch.zeros(noise.shape[:2], dtype=torch.int64, device=prompts.device)
    for place in range(LENGTH):
        logits = forward(inputs_of(prompts, answer))[0][:, LENGTH - 1 + place]
        drawn = (logits.float() + noise[:, place]).argmax(-1)
        answer = torch.cat([answer[:, :place], drawn[:, None], answer[:, place + 1 :]], 1)
    return answer, log_prob(forward(inputs_of(prompts, answer))[0][:, LENGTH - 1 :], answer)


def grpo_loss(outputs: tuple[Tensor, Cache], target: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the clipped objective with a penalty on the distance from the reference; aux: the distances per token."""
    answer, old, reference, advantage = target
    new = log_prob(outputs[0][:, LENGTH - 1 :], answer)
    ratio, away = (new - old).exp(), reference - new
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    kl, gap = away.exp() - away - 1, (new - old).abs()
    return (KL * kl - gain).mean(), {"kl": kl.mean(), "gap": gap.mean(), "gap_max": gap.max()}


class Run(NamedTuple):
    """The state of the step."""

    learner: funcamp.TrainState
    reference: dict[str, Tensor]
    """The first policy's parameters, as the loss gets them."""


def make_learner(dtype: str, total: int, config: funcamp.ScalerConfig | None = None) -> funcamp.TrainStep:
    """Return the step that learns from answers, with a scaler for float16 unless another is given."""
    loss_fn = funcamp.module_loss(Policy(), grpo_loss, has_aux=True)
    adamw = funcamp.stateless(
        torch.optim.AdamW, lr=lambda applied: LR * (1 - applied / (UPDATES * total)).clamp(min=0.1), weight_decay=0.0
    )
    if config is None:
        scaled = funcamp.ScalerConfig(growth_interval=100)
        config = scaled if dtype == "float16" else funcamp.presets.disabled()
    return funcamp.make_train_step(loss_fn, adamw, config, policy=dtype, max_norm=1.0)


def make_step(
    learner: funcamp.TrainStep, dtype: str, rollout: str
) -> Callable[[Run, Any], tuple[Run, dict[str, Tensor]]]:
    """Return the step of GRPO: (state, (prompts, noise)) to the new state and its metrics."""
    model, low = Policy(), getattr(torch, dtype)

    def bind(params: dict[str, Tensor]) -> Forward:
        return lambda *args: functional_call(model, params, args)

    def sample(params: dict[str, Tensor], prompts: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        if rollout == "trainer":
            return by_trainer(bind(params), prompts, noise)
        with torch.autocast(prompts.device.type, enabled=False):
            return by_engine(bind({name: value.to(low) for name, value in params.items()}), prompts, noise)

    def step(state: Run, batch: tuple[Tensor, Tensor]) -> tuple[Run, dict[str, Tensor]]:
        prompts, noise = batch
        with torch.no_grad(), learner.autocast(state.learner):
            answer, old = sample(learner.compute_params(state.learner), prompts, noise)
            inputs = inputs_of(prompts, answer)
            reference = log_prob(bind(state.reference)(inputs)[0][:, LENGTH - 1 :], answer)
        right = (answer == prompts.sort(1).values).float()
        reward = right.mean(1).view(PROMPTS, GROUP)
        advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
        after, rows = state.learner, []
        for _ in range(UPDATES):
            after, metrics = learner(after, (inputs, (answer, old, reference, advantage.view(-1, 1))))
            rows.append(metrics)
        found = {"reward": reward.mean(), "solved": right.prod(1).mean(), **rows[0].aux}  # before the first update
        return Run(after, state.reference), found | {"scale": rows[-1].scale, "skipped": rows[-1].skipped}

    return step


def first_state(learner: funcamp.TrainStep, seed: int, device: str = "cpu") -> Run:
    """Return the state before the first step."""
    torch.manual_seed(seed)
    state = learner.init(dict(Policy().to(device).named_parameters()))
    return Run(state, funcamp.clone(learner.compute_params(state)))


def batch_at(index: int, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Return prompts, each once for every member of its group, and Gumbel noise to draw digits with."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
    prompts = torch.randint(DIGITS, (PROMPTS, LENGTH), generator=generator).repeat_interleave(GROUP, 0)
    noise = -torch.empty(PROMPTS * GROUP, LENGTH, DIGITS).exponential_(generator=generator).log()
    return prompts.to(device), noise.to(device)


def train(run: Any, state: Run, steps: int, seed: int, device: str = "cpu") -> Iterator[dict[str, float]]:
    """Yield the numbers of every step, some steps late on a GPU."""
    reader = funcamp.MetricReader()
    for index in range(steps):
        state, metrics = run(state, batch_at(index, seed, device))
        reader.put(metrics)
        yield from reader.ready()
    yield from reader.drain()


def main(argv: list[str] | None = None, wrap: Callable[[Any], Any] = funcamp.jit) -> list[dict[str, float]]:
    """Train, print a line for every 40 steps, and return the numbers of all."""
    parser = argparse.ArgumentParser("grpo", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="float16")
    parser.add_argument("--rollout", choices=ROLLOUTS, default="engine")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args(argv)
    learner = make_learner(args.dtype, args.steps)
    run = wrap(make_step(learner, args.dtype, args.rollout))
    history: list[dict[str, float]] = []
    for row in train(run, first_state(learner, args.seed, args.device), args.steps, args.seed, args.device):
        if len(history) % 40 == 0 or len(history) == args.steps - 1:
            numbers = "  ".join(f"{name} {value:.3g}" for name, value in row.items())
            print(f"step {len(history)}  {numbers}")
        history.append(row)
    return history


if __name__ == "__main__":
    main()
