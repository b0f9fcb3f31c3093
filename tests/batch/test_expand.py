import pytest

from videoattn.batch.expand import MAX_JOBS, ExpandError, expand, parse_seeds


def points(**values):
    return [settings for settings, _ in expand(values)]


def test_a_plain_row_is_one_job():
    assert points(prompt="a", seed=3) == [{"prompt": "a", "seed": 3}]


@pytest.mark.parametrize(
    ("text", "seeds"),
    [("1..4", [1, 2, 3, 4]), ("7", [7]), ("1..3,9", [1, 2, 3, 9]), ([4, "1..2"], [4, 1, 2]), (5, [5])],
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds
    assert [each["seed"] for each in points(seeds=text)] == seeds


@pytest.mark.parametrize(
    "text", ["", "a", "3..1", "1..", "-1", "1.5", "1,1", [], True, f"0..{MAX_JOBS}", None]
)
def test_bad_seeds(text):
    with pytest.raises(ExpandError) as error:
        parse_seeds(text)
    assert error.value.column == "seeds"


def test_lists_are_crossed_the_last_one_fastest():
    assert points(prompt=["a", "b"], width=64, seeds="1..2") == [
        {"prompt": "a", "width": 64, "seed": 1},
        {"prompt": "a", "width": 64, "seed": 2},
        {"prompt": "b", "width": 64, "seed": 1},
        {"prompt": "b", "width": 64, "seed": 2},
    ]


def test_zipped_lists_advance_together():
    assert points(prompt=["a", "b"], image=["x", "y"], seeds=[1, 2], zip=["prompt", "image"]) == [
        {"prompt": "a", "image": "x", "seed": 1},
        {"prompt": "a", "image": "x", "seed": 2},
        {"prompt": "b", "image": "y", "seed": 1},
        {"prompt": "b", "image": "y", "seed": 2},
    ]
    assert points(prompt=["a", "b"], seeds="5..6", zip="prompt, seeds") == [
        {"prompt": "a", "seed": 5},
        {"prompt": "b", "seed": 6},
    ]
    two = points(a=[1, 2], b=[3, 4], c=[5, 6], d=[7, 8], zip=[["a", "b"], ["c", "d"]])
    assert [tuple(each.values()) for each in two] == [(1, 3, 5, 7), (1, 3, 6, 8), (2, 4, 5, 7), (2, 4, 6, 8)]


def test_a_list_is_the_value_of_list_columns():
    assert points(lora=["a:0.5", "b"]) == [{"lora": ["a:0.5", "b"]}]
    assert points(lora=[["a:0.5"], ["a:1", "b"]]) == [{"lora": ["a:0.5"]}, {"lora": ["a:1", "b"]}]


@pytest.mark.parametrize(
    ("values", "column", "message"),
    [
        ({"prompt": []}, "prompt", "empty"),
        ({"seed": 1, "seeds": "1..2"}, "seeds", "not both"),
        (
            {"prompt": ["a", "b"], "image": ["x"], "zip": ["prompt", "image"]},
            "zip",
            "prompt has 2, image has 1",
        ),
        ({"prompt": "a", "zip": ["prompt"]}, "zip", "not given as a list"),
        ({"prompt": ["a"], "zip": [["prompt"], ["prompt"]]}, "zip", "named twice"),
        ({"prompt": ["a"], "zip": 3}, "zip", "list of columns"),
        ({"seeds": "1..400", "width": list(range(400))}, "seed", "makes 160000 jobs"),
    ],
)
def test_what_cannot_be_expanded(values, column, message):
    with pytest.raises(ExpandError, match=message) as error:
        list(expand(values))
    assert error.value.column == column
