"""Optimizers against torch, schedules and the decay mask against transformers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
import transformers
from transformers import optimization as hf

from dew.training import optimizers, schedules
from dew.training.qk_clip import qk_clip
from dew.tree import flatten, unflatten
from tests.support.tolerances import MUON, OPTIMIZER, RTOL

NAMES = ("embed.weight", "layer.q.weight", "layer.q.bias", "layer.input_norm.weight")


def weights(seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Draws one array for each of `NAMES`."""
    draw = np.random.default_rng(seed)
    shapes = ((7, 4), (3, 5), (3,), (4,))
    return {
        name: (scale * draw.normal(size=shape)).astype(np.float32)
        for name, shape in zip(NAMES, shapes, strict=True)
    }


def gradients(commit: int) -> dict[str, Any]:
    """Draws gradients with norms on both sides of the limit."""
    return weights(commit + 1, (0.01, 30.0, 1.0)[commit % 3])


def nested(flat: dict[str, Any], dtype: Any = jnp.float32) -> dict[str, Any]:
    tree = {tuple(name.split(".")): jnp.asarray(x, dtype) for name, x in flat.items()}
    return {"params": unflatten(tree)}


def run(optimizer: optimizers.Optimizer, commits: int) -> dict[str, np.ndarray]:
    params: Any = nested(weights(0))
    state = optimizer.transform.init(params)
    update = jax.jit(optimizer.transform.update)
    for i in range(commits):
        updates, state = update(nested(gradients(i)), state, params)
        params = optax.apply_updates(params, updates)
    leaves = flatten(params["params"]).items()
    return {".".join(path): np.asarray(leaf) for path, leaf in leaves}


def run_torch(
    commits: int,
    make: Callable[[Any], torch.optim.Optimizer],
    *,
    rate: Callable[[int], float] = lambda i: 1.0,
    decay: float = 0.0,
    embed_lr: dict[str, float] | None = None,
) -> dict[str, np.ndarray]:
    """Does in torch what `run` does, with the norm clipped at 0.7."""
    params = {n: torch.nn.Parameter(torch.tensor(x)) for n, x in weights(0).items()}
    groups = [
        {"params": [params[NAMES[0]]], "weight_decay": decay, **(embed_lr or {})},
        {"params": [params[NAMES[1]]], "weight_decay": decay},
        {"params": [params[name] for name in NAMES[2:]], "weight_decay": 0.0},
    ]
    optimizer = make(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    for i in range(commits):
        for name, gradient in gradients(i).items():
            params[name].grad = torch.tensor(gradient)
        torch.nn.utils.clip_grad_norm_(params.values(), 0.7)
        optimizer.step()
        schedule.step()
    return {name: p.detach().numpy() for name, p in params.items()}


def assert_close(
    got: dict[str, Any], want: dict[str, Any], rtol: float = OPTIMIZER
) -> None:
    for name in NAMES:
        np.testing.assert_allclose(
            got[name], want[name], rtol=0, atol=rtol * np.max(np.abs(want[name]))
        )


def test_adamw_with_clipping_and_a_schedule_takes_the_steps_of_torch() -> None:
    rate = schedules.cosine(1.0, steps=8, warmup=2)
    ours = optimizers.adamw(
        lambda n: 3e-2 * rate(n), b2=0.95, weight_decay=0.3, clip_norm=0.7
    )
    want = run_torch(
        7,
        lambda groups: torch.optim.AdamW(groups, lr=3e-2, betas=(0.9, 0.95)),
        rate=lambda i: np.asarray(rate(i)).item(),
        decay=0.3,
    )
    assert_close(run(ours, 7), want)


def test_embeddings_can_have_a_learning_rate_of_their_own() -> None:
    ours = optimizers.adamw(
        1e-2,
        weight_decay=0.3,
        clip_norm=0.7,
        factors=((optimizers.is_embedding, 0.1),),
    )
    want = run_torch(
        4,
        lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        decay=0.3,
        embed_lr={"lr": 1e-3},
    )
    assert_close(run(ours, 4), want)


def test_sgd_with_momentum_takes_the_steps_of_torch() -> None:
    ours = optimizers.sgd(1e-2, momentum=0.9, clip_norm=0.7)
    want = run_torch(5, lambda groups: torch.optim.SGD(groups, lr=1e-2, momentum=0.9))
    assert_close(run(ours, 5), want)


def test_adafactor_takes_the_steps_of_transformers() -> None:
    ours = optimizers.adafactor(1e-2, factored_from=2, clip_norm=0.7)
    settings = {"lr": 1e-2, "scale_parameter": False, "relative_step": False}
    want = run_torch(5, lambda groups: hf.Adafactor(groups, **settings))
    assert_close(run(ours, 5), want)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_moments_stay_float32_under_bfloat16_params(name: str) -> None:
    transform = optimizers.OPTIMIZERS[name](1e-3, weight_decay=0.1).transform
    params = jax.eval_shape(lambda: nested(weights(0), jnp.bfloat16))
    state = jax.eval_shape(transform.init, params)
    updates, after = jax.eval_shape(transform.update, params, state, params)
    floats = {x.dtype for x in jax.tree.leaves(after) if x.dtype != jnp.int32}
    assert floats <= {jnp.dtype("float32")}
    assert after == state
    assert {u.dtype for u in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}


def test_lion_moves_by_signs_and_decays_weights_alone() -> None:
    ours = optimizers.lion(1e-2, b1=0.8, b2=0.9, weight_decay=0.5, clip_norm=None)
    want = {name: np.float64(x) for name, x in weights(0).items()}
    for name, decay in zip(NAMES, (0.5, 0.5, 0.0, 0.0), strict=True):
        momentum = np.zeros_like(want[name])
        for i in range(3):
            gradient = gradients(i)[name]
            sign = np.sign(0.8 * momentum + 0.2 * gradient)
            want[name] = want[name] - 1e-2 * (sign + decay * want[name])
            momentum = 0.9 * momentum + 0.1 * gradient
    assert_close(run(ours, 3), want)


def test_muon_orthogonalises_matrices_and_leaves_the_rest_to_adam() -> None:
    draw = np.random.default_rng(3)
    tree = unflatten(
        {
            ("params", "embed", "weight"): jnp.asarray(draw.normal(size=(9, 6))),
            ("params", "attn", "q", "weight"): jnp.asarray(draw.normal(size=(2, 3, 6))),
            ("params", "attn", "q", "bias"): jnp.asarray(draw.normal(size=(2, 3))),
        }
    )
    tree = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
    transform = optimizers.muon(1.0).transform
    updates: Any = transform.update(tree, transform.init(tree), tree)[0]
    moved = {path[2:]: np.asarray(leaf) for path, leaf in flatten(updates).items()}
    matrix = moved["q", "weight"].reshape(6, 6)
    singular = np.linalg.svd(matrix, compute_uv=False)
    # Five Newton-Schulz rounds bring singular values near 1, not to it.
    np.testing.assert_allclose(singular / (0.2 * np.sqrt(6)), 1.0, atol=MUON)
    # Nesterov's Adam starts with 1 + b1 / (1 + b1) times the sign.
    for rest in (moved["weight",], moved["q", "bias"]):
        np.testing.assert_allclose(np.abs(rest), 1 + 0.9 / 1.9, rtol=RTOL["float32"])


def tiny(config_class: Any, **settings: Any) -> Any:
    """Builds a model of two narrow layers on the meta device, for its names alone."""
    config = config_class(**settings)
    with torch.device("meta"):
        return transformers.AutoModel.from_config(config)


TINY = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
MODELS = {
    "llama": lambda: tiny(transformers.LlamaConfig, **TINY, intermediate_size=8),
    "qwen3": lambda: tiny(transformers.Qwen3Config, **TINY, intermediate_size=8),
    "gemma2": lambda: tiny(transformers.Gemma2Config, **TINY, intermediate_size=8),
    "gpt2": lambda: tiny(transformers.GPT2Config, n_embd=8, n_layer=2, n_head=2),
    "bert": lambda: tiny(transformers.BertConfig, **TINY, intermediate_size=8),
    "opt": lambda: tiny(transformers.OPTConfig, **TINY, ffn_dim=8),
    "bloom": lambda: tiny(transformers.BloomConfig, hidden_size=8, n_layer=2, n_head=2),
    "neox": lambda: tiny(transformers.GPTNeoXConfig, **TINY, intermediate_size=8),
    "t5": lambda: tiny(transformers.T5Config, d_model=8, num_layers=2, d_ff=8),
    "vit": lambda: tiny(transformers.ViTConfig, **TINY, intermediate_size=8),
    "whisper": lambda: tiny(
        transformers.WhisperConfig,
        d_model=8,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_decay_mask_is_that_of_transformers(name: str) -> None:
    model = MODELS[name]()
    want = set(transformers.Trainer.get_decay_parameter_names(None, model))  # pyright: ignore[reportArgumentType]
    # Without the second names of shared weights, which no tree of ours holds.
    names = {n for n, _ in model.named_parameters()}
    got = {n for n in names if optimizers.is_decayed(("params", *n.split(".")))}
    assert got == want & names


@pytest.mark.parametrize(
    ("path", "decayed"),
    [
        ("layers/0/attn/q/weight", True),
        ("embed/weight", True),
        ("head/weight", True),
        ("layers/0/attn/q/bias", False),
        ("layers/0/attn_norm/weight", False),
        ("norm/weight", False),
        ("bn1/weight", False),
        ("encoder/ln_post/weight", False),
        ("normalization/weight", False),
        ("blocks/0/norm1/linear/weight", True),
    ],
)
def test_the_decay_mask_reads_native_and_other_names(path: str, decayed: bool) -> None:
    assert optimizers.is_decayed(("params", *path.split("/"))) == decayed


# ViT's positions are a bare parameter.
@pytest.mark.parametrize("name", sorted(set(MODELS) - {"vit"}))
def test_embeddings_are_found_by_name(name: str) -> None:
    model = MODELS[name]()
    names = {n for n, _ in model.named_parameters()}
    tables = {
        f"{n}.weight"
        for n, module in model.named_modules()
        if isinstance(module, torch.nn.Embedding)
    }
    got = {n for n in names if optimizers.is_embedding(("params", *n.split(".")))}
    # T5's relative positions are a table of biases, one number a head.
    assert got == {n for n in tables & names if "bias" not in n}


SETTINGS: dict[str, Any] = {"steps": 100, "warmup": 10}


def hf_rates(make: Callable[[Any], Any], commits: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = make(optimizer)
    rates = []
    for _ in range(commits):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return rates


def hf_wsd(shape: str, floor: float) -> Callable[[Any], Any]:
    return lambda o: hf.get_wsd_schedule(
        o, 10, 30, num_stable_steps=60, decay_type=shape, min_lr_ratio=floor
    )


SCHEDULES = {
    "constant": (
        schedules.constant(2.0, warmup=10),
        lambda o: hf.get_constant_schedule_with_warmup(o, 10),
    ),
    "linear": (
        schedules.linear(2.0, **SETTINGS),
        lambda o: hf.get_linear_schedule_with_warmup(o, 10, 100),
    ),
    "no warmup": (
        schedules.schedule_by_name("cosine", 2.0, steps=100),
        lambda o: hf.get_cosine_schedule_with_warmup(o, 0, 100),
    ),
    "cosine to a floor": (
        schedules.cosine(2.0, min_ratio=0.1, **SETTINGS),
        lambda o: hf.get_cosine_with_min_lr_schedule_with_warmup(
            o, 10, 100, min_lr_rate=0.1
        ),
    ),
    "wsd linear": (
        schedules.wsd(2.0, decay=30, shape="linear", **SETTINGS),
        hf_wsd("linear", 0.0),
    ),
    "wsd cosine": (
        schedules.wsd(2.0, decay=30, shape="cosine", min_ratio=0.2, **SETTINGS),
        hf_wsd("cosine", 0.2),
    ),
    "wsd 1-sqrt": (
        schedules.wsd(2.0, decay=30, min_ratio=0.2, **SETTINGS),
        hf_wsd("1-sqrt", 0.2),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_follow_the_formulas_of_transformers(name: str) -> None:
    ours, make = SCHEDULES[name]
    got = [np.asarray(ours(i)) for i in range(101)]
    np.testing.assert_allclose(got, hf_rates(make, 101), atol=OPTIMIZER)


def test_schedules_stay_at_their_floor_past_the_end() -> None:
    for name in set(schedules.SCHEDULES) - {"constant"}:
        rate = schedules.schedule_by_name(
            name, 2.0, steps=100, warmup=10, min_ratio=0.25
        )
        for commits in (100, 150, 10**6):
            assert np.asarray(rate(commits)) == 0.5


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: schedules.schedule_by_name("cos", 1.0, steps=9),
            "'cos'; choose from constant",
        ),
        (lambda: schedules.cosine(1.0, steps=5, warmup=9), "decay must .*got -4"),
        (lambda: schedules.wsd(1.0, steps=5, decay=9), "stable part must .*got -4"),
        (lambda: schedules.linear(-1.0, steps=5, min_ratio=2.0), "got -1.*got 2"),
        (
            lambda: schedules.schedule_by_name("constant", 1.0, steps=5, min_ratio=0.1),
            "never decays",
        ),
        (lambda: optimizers.adamw(1e-3, clip_norm=0.0), "clip_norm must be > 0"),
        (lambda: optimizers.adamw(1e-3, weight_decay=-1.0), "weight_decay .* got -1"),
        (lambda: qk_clip(0.0), "tau must be > 0, got 0.0"),
        (lambda: qk_clip(1.0, alpha=2.0), "alpha must .* got 2"),
    ],
)
def test_wrong_numbers_are_named(build: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_a_learning_rate_filter_that_finds_nothing_is_an_error() -> None:
    optimizer = optimizers.adamw(1e-3, factors=((lambda path: False, 0.1),))
    with pytest.raises(ValueError, match=r"none of the 4 leaves; .*embed/weight"):
        optimizer.transform.init(nested(weights(0)))
