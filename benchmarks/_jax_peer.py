"""The same training step in JAX: jitted with donation, optax's AdamW, jmp's rule for the scale.

The models are those of `_models`, with its weights, written as JAX users would: parameters in float32, products in the
low precision, LayerNorm, BatchNorm and the loss in float32.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch wants memory of the same GPU

import jax
import jax.numpy as jnp
import optax
import torch
from _models import Size, build

Params = dict[str, Any]
PERIOD = 10**6


def as_array(tensor: torch.Tensor) -> Any:
    """A copy, integers as int32."""
    values = tensor.detach().cpu().numpy()
    return jnp.asarray(values.astype("int32") if values.dtype == "int64" else values)


def linear(p: Params, name: str, x: Any) -> Any:
    """x W^T + b in x's dtype."""
    out = x @ p[f"{name}.weight"].astype(x.dtype).T
    return out + p[f"{name}.bias"].astype(x.dtype) if f"{name}.bias" in p else out


def layer_norm(p: Params, name: str, x: Any, low: Any) -> Any:
    """In float32, the result in low."""
    x = x.astype(jnp.float32)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return ((x - mean) * jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"] + p[f"{name}.bias"]).astype(low)


def mlp(p: Params, x: Any, size: Size, low: Any) -> Any:
    """Logits."""
    for i in range(size.blocks):
        hidden = jax.nn.gelu(linear(p, f"{i}.up", layer_norm(p, f"{i}.norm", x, low)), approximate=False)
        x = x + linear(p, f"{i}.down", hidden)
    return linear(p, f"{size.blocks}", x.astype(low))


def conv(p: Params, name: str, x: Any, stride: int) -> Any:
    """3 x 3, padded by 1."""
    weight = p[f"{name}.weight"].astype(x.dtype)
    layout = ("NCHW", "OIHW", "NCHW")
    return jax.lax.conv_general_dilated(x, weight, (stride, stride), ((1, 1), (1, 1)), dimension_numbers=layout)


def cnn(p: Params, stats: Params, x: Any, size: Size, low: Any) -> tuple[Any, Params]:
    """Logits, and the running statistics after the batch."""
    x = conv(p, "stem", x.astype(low), 2)
    after = {}
    for i in range(size.blocks):
        y = conv(p, f"blocks.{i}.conv", x, 1).astype(jnp.float32)
        name = f"blocks.{i}.norm"
        count = y.size / y.shape[1]
        mean, var = y.mean((0, 2, 3)), y.var((0, 2, 3))
        after[f"{name}.mean"] = 0.9 * stats[f"{name}.mean"] + 0.1 * mean
        after[f"{name}.var"] = 0.9 * stats[f"{name}.var"] + 0.1 * var * count / (count - 1)
        factor = jax.lax.rsqrt(var + 1e-5) * p[f"{name}.weight"]
        y = (y - mean[:, None, None]) * factor[:, None, None] + p[f"{name}.bias"][:, None, None]
        x = jax.nn.relu(x + y.astype(low))
    return linear(p, "head", x.mean((2, 3))), after


def gpt(p: Params, tokens: Any, size: Size, low: Any) -> Any:
    """Logits."""
    x = p["tokens.weight"][tokens] + p["positions"]
    heads = max(size.width // 64, 2)
    for i in range(size.blocks):
        name = f"blocks.{i}"
        qkv = linear(p, f"{name}.qkv", layer_norm(p, f"{name}.norm1", x, low))
        q, k, v = (part.reshape(*part.shape[:2], heads, -1) for part in jnp.split(qkv, 3, -1))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(p, f"{name}.out", attended.reshape(x.shape))
        hidden = jax.nn.gelu(linear(p, f"{name}.up", layer_norm(p, f"{name}.norm2", x, low)), approximate=False)
        x = x + linear(p, f"{name}.down", hidden)
    return layer_norm(p, "norm", x, low) @ p["tokens.weight"].astype(low).T


def adjusted(state: tuple[Any, Any], finite: Any) -> tuple[Any, Any]:
    """jmp's DynamicLossScale: doubled after a period of clean steps, halved at an overflow, not below 1."""
    scale, clean = state
    last = clean == PERIOD - 1
    grown = jnp.where(last & jnp.isfinite(2 * scale), 2 * scale, scale)
    return jnp.where(finite, grown, jnp.maximum(scale / 2, 1)), jnp.where(finite & ~last, clean + 1, 0)


def loss_of(p: Params, stats: Params, x: Any, y: Any, size: Size, low: Any) -> tuple[Any, Params]:
    """Cross entropy in float32, and the running statistics."""
    if size.kind == "cnn":
        logits, stats = cnn(p, stats, x, size, low)
    else:
        logits = (mlp if size.kind == "mlp" else gpt)(p, x, size, low)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
    return losses.mean(), stats


def step(size: Size, device: str, dtype: torch.dtype) -> tuple[Callable[[], Any], Callable[[], None]]:
    """A training step, and what waits for the steps that were begun."""
    model, x, y = build(size, "cpu")
    low = {torch.float16: jnp.float16, torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32}[dtype]
    params = {name: as_array(value) for name, value in model.named_parameters()}
    norms = [name for name, _ in model.named_buffers() if name.endswith("running_mean")]
    stats = {}
    for name in norms:
        stats[name.replace("running_", "")] = jnp.zeros_like(as_array(model.get_buffer(name)))
        stats[name.replace("running_mean", "var")] = jnp.ones_like(as_array(model.get_buffer(name)))
    optimizer = optax.adamw(1e-4, weight_decay=1e-2)
    scale = (jnp.float32(2.0**16), jnp.int32(0))
    place = jax.devices("cuda" if device == "cuda" else "cpu")[0]
    data = jax.device_put((as_array(x), as_array(y)), place)

    def train(params: Params, stats: Params, opt_state: Any, scale: Any, x: Any, y: Any) -> Any:
        def scaled(p: Params) -> Any:
            loss, after = loss_of(p, stats, x, y, size, low)
            return loss * scale[0], (loss, after)

        grads, (loss, after) = jax.grad(scaled, has_aux=True)(params)
        grads = jax.tree.map(lambda grad: grad / scale[0], grads)
        finite = jnp.stack([jnp.isfinite(grad).all() for grad in jax.tree.leaves(grads)]).all()
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new, old = (optax.apply_updates(params, updates), after, new_opt_state), (params, stats, opt_state)
        params, stats, opt_state = jax.tree.map(lambda a, b: jax.lax.select(finite, a, b), new, old)
        return params, stats, opt_state, adjusted(scale, finite), loss

    run = jax.jit(train, donate_argnums=(0, 1, 2, 3))
    held = [jax.device_put((params, stats, optimizer.init(params), scale), place), None]

    def call() -> Any:
        *held[0], held[1] = run(*held[0], *data)
        return held[1]

    wait: Any = jax.block_until_ready
    return call, lambda: wait(held[1])
