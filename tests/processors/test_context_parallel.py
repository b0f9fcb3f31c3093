"""One clip over several ranks equals one process: attention, transformers, whole pipelines, on gloo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.pipelines import SIZE
from tests.processors import parallel_checks as checks
from tests.processors.ranks import Ranks
from videoattn.processors.parallel.attention import merge, present, share

pytestmark = pytest.mark.slow

DEGREES = [(2, 1), (1, 2)]
LARGER = [(4, 1), (1, 4), (2, 2), (1, 3)]
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=TOLERANCE)


def reference(q, k, v, mask):
    query, key, value = (t.double().transpose(1, 2) for t in (q, k, v))
    mask = None if mask is None else mask.double()
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask).transpose(1, 2).float().numpy()


@pytest.mark.parametrize(
    ("tokens", "parts"), [(36, [18, 18]), (37, [19, 18]), (5, [2, 2, 1, 0]), (1, [1, 0])]
)
def test_shares(tokens, parts):
    size = share(tokens, len(parts))
    assert [present(tokens, rank * size, size) for rank in range(len(parts))] == parts


def test_merging_is_attention_to_the_union():
    q, k, v = (checks.draw(2, 9, seed=seed) for seed in range(3))

    def part(keys):
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k[:, keys]) / 4
        return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v[:, keys]), scores.logsumexp(-1)

    one, other = part(slice(0, 2)), part(slice(2, 9))
    out, lse = merge(one, other)
    np.testing.assert_allclose(out, reference(q, k, v, None), atol=1e-6)
    torch.testing.assert_close(lse, part(slice(0, 9))[1])
    nothing = torch.zeros_like(one[0]), torch.full_like(one[1], -torch.inf)
    for merged in (merge(one, nothing), merge(nothing, one)):
        assert all(torch.equal(a, b) for a, b in zip(merged, one, strict=True))
    assert torch.equal(merge(nothing, nothing)[0], nothing[0])


@pytest.mark.parametrize("degrees", [*DEGREES, *LARGER])
@pytest.mark.parametrize(
    ("tokens", "batch", "masked"), [(24, 1, False), (37, 2, False), (13, 2, True), (2, 1, False)]
)
def test_self_attention(ranks, degrees, tokens, batch, masked):
    q, k, v = (checks.draw(batch, tokens, seed=seed) for seed in range(3))
    k[:, tokens // 2] *= 20
    mask = checks.random_mask(batch, tokens, tokens) if masked else None
    whole = reference(q, k, v, mask)
    count = degrees[0] * degrees[1]
    for out in ranks.run(checks.self_attention, *degrees, tokens, batch, masked, ranks=count):
        np.testing.assert_allclose(out, whole, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize(("tokens", "masked"), [(24, False), (13, True), (2, False)])
def test_keys_in_parts(ranks, tokens, masked):
    q, k, v = checks.draw(2, 7), checks.draw(2, tokens, seed=1), checks.draw(2, tokens, seed=2)
    whole = reference(q, k, v, checks.random_mask(2, 1, tokens) if masked else None)
    results = ranks.run(checks.split_keys, 2, 2, tokens, masked, ranks=4)
    np.testing.assert_allclose(results[0], whole, atol=2e-6, rtol=2e-6)
    assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("version", ["ltx", "2.0", "2.3", "2.5"])
def test_forward(ranks, version, degrees):
    """Stock's own result on one process, with padded text and 17 audio tokens."""
    results = ranks.run(checks.forward, version, *degrees, [9], {})
    whole = checks.arrays(checks.build(version)(**checks.inputs_of(version, [9])))
    for result in results:
        close(result, whole)
    assert all(np.array_equal(a, b) for a, b in zip(*results, strict=True))


# Masks that differ from row to row: additive, as the blocks get them, and leaving every row its first key.
ROWS = torch.where((torch.arange(36 * 32) % 5 > 1).reshape(1, 36, 32), 0.0, -10000.0)
ROWS[..., 0] = 0.0

PER_TOKEN = {
    "ltx": {"timestep": torch.linspace(0, 1000, 36).expand(2, 36)},
    "2.0": {"encoder_attention_mask": ROWS.expand(2, 36, 32)},
    "2.3": {
        "timestep": torch.linspace(0, 1000, 36).expand(2, 36),
        "audio_timestep": torch.full((2,), 300.0),
        "audio_sigma": torch.full((2,), 300.0),
        "use_cross_timestep": True,
        "perturbation_mask": torch.tensor([1.0, 0.0]),
        "spatio_temporal_guidance_blocks": [1],
    },
    "2.5": {
        "timestep": torch.full((2,), 500.0),
        "video_keyframes_mask": (torch.arange(36) < 12).float()[None, :, None].expand(2, 36, 1),
        "video_self_attention_mask": (torch.arange(36 * 36) % 7 > 0)
        .float()
        .reshape(1, 36, 36)
        .expand(2, 36, 36),
    },
}


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("version", PER_TOKEN)
def test_arguments_for_each_token(ranks, version, degrees):
    more = PER_TOKEN[version]
    whole = checks.arrays(checks.build(version)(**checks.inputs_of(version, [9, 32], batch=2) | more))
    for result in ranks.run(checks.forward, version, *degrees, [9, 32], more, 3, 2):
        close(result, whole)


@pytest.mark.parametrize(("version", "degrees"), [("ltx", (1, 3)), ("2.3", (1, 3)), ("2.3", (2, 2))])
def test_video_tokens_that_do_not_divide(ranks, version, degrees):
    """5 × 12 = 60 tokens less one: 59 of 60 places, or 20 + 20 + 19."""
    more = {"hidden_states": checks.inputs_of(version, None, frames=5)["hidden_states"][:, :59]}
    coordinates = torch.rand(1, 3, 59, 2, generator=torch.Generator().manual_seed(2)).sort(-1).values
    more["video_coords"] = coordinates[..., 0] if version == "ltx" else coordinates
    whole = checks.arrays(checks.build(version)(**checks.inputs_of(version, [9]) | more))
    for result in ranks.run(checks.forward, version, *degrees, [9], more, ranks=degrees[0] * degrees[1]):
        close(result, whole)


@pytest.mark.parametrize("version", ["ltx", "2.3"])
def test_enabled_before_the_install(ranks, version):
    whole = checks.arrays(checks.build(version)(**checks.inputs_of(version, [9])))
    for result in ranks.run(checks.enabled_before, version):
        close(result, whole)


@pytest.mark.parametrize("version", ["ltx", "2.3"])
def test_uninstall_leaves_diffusers_parallelism(ranks, version):
    """It fails by itself, as it does without videoattn; the message is diffusers', not ours."""
    for said in ranks.run(checks.uninstalled_after, version):
        assert said
        assert "videoattn" not in said


def test_a_copy_is_parallel_by_itself(ranks):
    whole = checks.arrays(checks.build("ltx")(**checks.inputs_of("ltx", [9])))
    for result in ranks.run(checks.copied):
        close(result, whole * 2)


def test_refusals(ranks):
    for said in ranks.run(checks.refusals):
        assert said["heads"] == (
            "ValueError: Ulysses shares out whole heads, and 4 does not divide this model's 2: take a degree "
            "of 1, 2, or the ring"
        )
        assert "4 ranks, and 2 are running" in said["ranks"]
        assert "leave cp_plan out" in said["plan"]
        assert "serves context parallelism of the transformer" in said["tensor"]
        assert "call disable_cache()" in said["cache"]
        assert "call disable_cache()" in said["cache later"]
        assert "already enabled" in said["twice"]
        assert "behind its back" in said["behind"]
        assert "3 does not divide" in said["install"]


def test_without_a_group():
    from diffusers import ContextParallelConfig

    import videoattn

    model = checks.build("ltx")
    videoattn.install(model)
    with pytest.raises(RuntimeError, match="start the ranks by torchrun"):
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


def test_compiled_blocks(ranks):
    """One graph, with the ring and the merging of the sound's results as opaque ops."""
    whole = checks.arrays(checks.build("2.3")(**checks.inputs_of("2.3", [9])))
    for result in ranks.run(checks.compiled, "2.3"):
        close(result, whole)


def test_the_log_states_the_shapes_of_the_rank(ranks):
    local = {"video_text": (2, 18, 32, 0), "audio_to_video": (2, 18, 17, 0), "video_to_audio": (2, 17, 18, 1)}
    sound = {"audio_self": (2, 17, 17, 0), "audio_text": (2, 17, 32, 0)}
    for said in ranks.run(checks.shapes, 2, 1):
        assert said == local | sound | {"video_self": (1, 36, 36, 0)}
    for said in ranks.run(checks.shapes, 1, 2):
        assert said == local | sound | {"video_self": (2, 18, 18, 1)}


@pytest.mark.parametrize(
    ("version", "degrees", "guided", "from_image"),
    [
        ("ltx", (2, 1), True, False),
        ("ltx", (1, 2), True, True),
        ("2.3", (2, 1), True, False),
        ("2.3", (1, 2), False, True),
    ],
)
def test_pipelines(ranks, version, degrees, guided, from_image):
    assert SIZE["num_frames"] == 17
    whole = checks.pipeline(version, 1, 1, guided, from_image)
    for result in ranks.run(checks.pipeline, version, *degrees, guided, from_image):
        for ours, theirs in zip(result, whole, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-4)
            assert theirs.std() > 1e-3


def test_the_measuring_script(ranks):
    table, other = ranks.run(checks.benchmark, ["--device", "cpu", "--layers", "1", "--rounds", "2"])
    rows = [line.split() for line in table.splitlines()[2:]]
    assert [row[0] for row in rows] == ["1", "ulysses:2", "ring:2"]
    assert [row[-1] for row in rows] == ["yes"] * 3, table
    assert "128x96x17" in table
    assert other == "0 arms"


@pytest.mark.parametrize(
    "arguments", [["--ranks", "1"], ["--rounds", "1"], ["--device", "cuda", "--ranks", "4096"]]
)
def test_what_the_measuring_script_refuses(arguments, capsys):
    with pytest.raises(SystemExit):
        checks.bench.parse(arguments)
    assert "error: --r" in capsys.readouterr().err
