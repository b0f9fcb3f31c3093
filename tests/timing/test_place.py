"""Layer and forward of a call, told from the order of calls."""

import pytest

from videoattn.timing.place import BLOCK_ORDER, Places


def forwards(places, layers, count, skip=lambda forward, layer, kind: False):
    """Drive the calls of whole forwards through `places`, and hold every place against the true one."""
    for forward in range(count):
        for layer in range(layers):
            for kind in BLOCK_ORDER:
                if not skip(forward, layer, kind):
                    place = places.next(kind)
                    assert (place.forward, place.layer) == (forward, layer), kind


def every(layers):
    return dict.fromkeys(BLOCK_ORDER, layers)


def test_plain_forwards():
    forwards(Places(every(48)), 48, 3)


def test_spatio_temporal_guidance_skips_self_attention_in_one_block():
    forwards(
        Places(every(48)),
        48,
        6,
        lambda forward, layer, kind: forward % 3 == 1 and layer == 28 and "self" in kind,
    )


def test_isolated_modalities_skip_the_crossing_calls():
    forwards(Places(every(5)), 5, 6, lambda forward, layer, kind: forward % 2 == 1 and "_to_" in kind)


def test_both_at_once_in_the_first_block():
    forwards(
        Places(every(3)),
        3,
        4,
        lambda forward, layer, kind: "_to_" in kind or (layer == 0 and forward % 2 == 1 and "self" in kind),
    )


def test_ltx_video_has_two_kinds():
    skipped = [kind for kind in BLOCK_ORDER if "audio" in kind]
    layers = {"video_self": 28, "video_text": 28}
    forwards(Places(layers), 28, 2, lambda forward, layer, kind: kind in skipped)


def test_connectors_are_counted_apart_from_the_blocks():
    places = Places({**every(2), "video_connector": 8, "audio_connector": 8})
    for forward in range(2):
        for kind in ("video_connector", "audio_connector"):
            for layer in range(8):
                place = places.next(kind)
                assert (place.forward, place.layer) == (forward, layer)
    forwards(places, 2, 2)


def test_blocks_left_out_shift_no_later_step():
    """FirstBlockCache runs the first block alone where the others would change little."""
    places = Places(every(4))
    # One forward a step.
    for step, whole in enumerate((True, False, False, True, True)):
        for layer in range(4 if whole else 1):
            for kind in BLOCK_ORDER:
                place = places.next(kind, step)
                assert (place.forward, place.layer) == (step, layer), kind


def test_a_steps_forwards_are_counted_on():
    places = Places({**every(2), "video_connector": 2})
    for step in range(3):
        for forward in (2 * step, 2 * step + 1):
            # Made in every forward here, though connectors belong to no step.
            assert [places.next("video_connector", step).forward for _ in range(2)] == [forward] * 2
            for layer in range(2):
                for kind in BLOCK_ORDER:
                    place = places.next(kind, step)
                    assert (place.forward, place.layer) == (forward, layer), kind


def test_unknown_layers_leave_the_place_open():
    places = Places({"video_self": 2})
    assert [places.next(kind).index for kind in ("video_text", None, "video_text", None)] == [0, 0, 1, 1]
    assert places.next("video_text").layer is None
    with pytest.raises(ValueError, match="at least 1"):
        Places({"video_self": 0})
