from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from videoattn.render.errors import UsageError
from videoattn.render.job import MAX_SEED, RenderJob, parse_attention, parse_frame_rate, parse_lora


@pytest.mark.parametrize(
    ("given_rate", "rate"),
    [
        (24, Fraction(24)),
        (25.0, Fraction(25)),
        ("23.976", Fraction(24000, 1001)),
        (29.97, Fraction(30000, 1001)),
        ("59.94", Fraction(60000, 1001)),
        ("24000/1001", Fraction(24000, 1001)),
        ("12.5", Fraction(25, 2)),
        (" 30 ", Fraction(30)),
    ],
)
def test_frame_rates_are_exact(given_rate, rate):
    assert parse_frame_rate(given_rate) == rate


@pytest.mark.parametrize(
    "bad",
    [
        "fast",
        "0",
        "-24",
        "1/0",
        "nan",
        "inf",
        1000,
        "24/1/2",
        "",
        "1e999999999",
        "1e-999999999",
        "24." + "1" * 5000,
    ],
)
def test_bad_frame_rates_are_refused(bad):
    with pytest.raises(ValueError, match="frame rate"):
        parse_frame_rate(bad)


@given(st.integers(1, 240), st.sampled_from([1, 1001]))
def test_a_frame_rate_survives_json(rate, divisor):
    exact = Fraction(rate * (1000 if divisor == 1001 else 1), divisor)
    if exact < 1:
        return
    job = RenderJob(frame_rate=exact)
    assert RenderJob.model_validate_json(job.model_dump_json()).frame_rate == exact


def test_a_full_job_survives_json():
    job = RenderJob(
        prompt="  a red ball ",
        seed=MAX_SEED,
        lora=["style.safetensors:0.5", "org/other"],
        attention="video_self=sdpa,video_text=auto",
        spatio_temporal_guidance_blocks=[28, 29],
        frame_rate="30000/1001",
    )
    again = RenderJob.model_validate_json(job.model_dump_json())
    assert again == job
    assert again.prompt == "a red ball"
    assert again.loras == [("style.safetensors", 0.5), ("org/other", 1.0)]
    assert again.kernels == {"video_self": "sdpa", "video_text": "auto"}
    assert again.spatio_temporal_guidance_blocks == (28, 29)


def test_text_cells_of_a_table_are_understood():
    job = RenderJob.parse(
        {"lora": "a.safetensors:2,b.safetensors", "spatio_temporal_guidance_blocks": "3, 4", "seed": "7"}
    )
    assert job.lora == ("a.safetensors:2", "b.safetensors")
    assert job.spatio_temporal_guidance_blocks == (3, 4)
    assert job.seed == 7


@pytest.mark.parametrize(
    ("entry", "source", "scale"),
    [
        ("a.safetensors", "a.safetensors", 1.0),
        ("a.safetensors:-0.25", "a.safetensors", -0.25),
        ("C:/loras/a.safetensors", "C:/loras/a.safetensors", 1.0),
        ("C:/loras/a.safetensors:2", "C:/loras/a.safetensors", 2.0),
    ],
)
def test_lora_entries(entry, source, scale):
    assert parse_lora(entry) == (source, scale)


def test_attention_may_be_a_mapping():
    assert RenderJob(attention={"video_self": "flash4"}).attention == "video_self=flash4"
    assert parse_attention("auto") == "auto"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "--seed -1"),
        ({"seed": MAX_SEED + 1}, "--seed"),
        ({"width": 0}, "--width 0"),
        ({"attention": "flash9"}, "unknown attention kernel 'flash9': choose from auto, blackwell"),
        ({"attention": "video=sdpa"}, "unknown kind of attention call 'video': choose from video_self"),
        ({"dtype": "int8"}, "--dtype int8: input should be 'auto', 'bf16'"),
        ({"stepz": 3}, "--stepz is no setting of a render"),
        ({"lora": "a:inf"}, "finite"),
        ({"frame_rate": "x"}, "--frame-rate: 'x' is no frame rate"),
        ({"guidance_scale": float("nan")}, "--guidance-scale"),
        ({"prompt": "a\x00b"}, "NUL"),
    ],
)
def test_bad_values_are_named_in_one_line(values, message):
    with pytest.raises(UsageError) as caught:
        RenderJob.parse(values)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_job_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        RenderJob().seed = 3  # type: ignore[misc]
