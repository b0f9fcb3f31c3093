"""Expected attention calls: known numbers on released configs, and real renders of tiny models."""

from collections import Counter

import pytest

from tests.configs import LTX_2_3, write
from videoattn.render.checks import check
from videoattn.render.expected import CallShape, counted_calls, differences, expected_calls
from videoattn.render.job import RenderJob
from videoattn.render.run import Renderer


@pytest.fixture
def released(tmp_path):
    """A folder with LTX-2.3's configs and no weights."""
    write(tmp_path, LTX_2_3)
    return tmp_path


def calls_of(folder, **values):
    return expected_calls(check(RenderJob.parse({"prompt": "x", "model": str(folder), **values})))


def test_a_distilled_clip_of_ltx23_makes_the_known_calls(released):
    calls = calls_of(released, recipe="distilled", width=1536, height=1024, num_frames=249, frame_rate=24)
    transformer = Counter({shape: n for shape, n in calls.items() if "connector" not in shape.kind})
    assert transformer.total() == 3168
    assert sum(n for shape, n in transformer.items() if shape.head_dim == 128) == 1056
    assert calls.total() - transformer.total() == 32
    assert calls[CallShape("denoise_full", "video_self", 1, 32, 49152, 49152, 128)] == 144
    assert calls[CallShape("denoise_half", "video_text", 1, 32, 12288, 1024, 128)] == 384
    assert calls[CallShape("denoise_half", "audio_self", 1, 32, 259, 259, 64)] == 384
    tera = (
        sum(4 * s.batch * s.heads * s.q_len * s.kv_len * s.head_dim * n for s, n in transformer.items())
        / 1e12
    )
    assert tera == pytest.approx(6899, rel=1e-3)


def test_guidance_costs_what_it_costs(released):
    calls = calls_of(released, width=768, height=512, num_frames=121, frame_rate=24)
    by_batch = Counter()
    for shape, number in calls.items():
        if shape.kind == "video_self":
            by_batch[shape.batch] += number
    assert by_batch == {2: 30 * 48, 1: 30 * (47 + 48)}
    across = sum(number for shape, number in calls.items() if shape.kind == "audio_to_video")
    assert across == 30 * 48 * 2


@pytest.mark.parametrize(
    ("folder", "values"),
    [
        ("ltx_folder", {"num_inference_steps": 2, "width": 128, "height": 96, "num_frames": 17}),
        ("ltx2_folder", {"recipe": "distilled", "width": 128, "height": 128, "num_frames": 9}),
        ("ltx2_folder", {"num_inference_steps": 2, "width": 128, "height": 96, "num_frames": 17}),
        ("ltx20_folder", {"num_inference_steps": 2, "width": 128, "height": 96, "num_frames": 9}),
    ],
)
def test_a_real_render_makes_the_expected_calls(folder, values, request, tmp_path):
    path = request.getfixturevalue(folder)
    renderer = Renderer()
    prepared = renderer.check(RenderJob.parse({"prompt": "a red ball", "model": str(path), **values}))
    result = renderer.render(prepared, output=tmp_path / "clip.mp4", timing=tmp_path / "t.jsonl")
    assert differences(expected_calls(prepared), counted_calls(result.log.rows)) == []


def test_a_difference_is_named():
    expected = Counter({CallShape("denoise", "video_self", 1, 2, 10, 10, 64): 3})
    counted = Counter({CallShape("denoise", "video_self", 1, 2, 10, 10, 64): 2})
    assert differences(expected, counted) == [
        "denoise video_self 1x2x64, q_len 10, kv_len 10: 2 calls, expected 3"
    ]
    assert len(differences(expected, Counter())) == 1
    assert len(differences(Counter(), counted)) == 1
