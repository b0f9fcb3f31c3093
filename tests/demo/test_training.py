"""The stages of the training, at sizes that a CPU takes in seconds."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from videoattn.demo.scenes import MOTIONS, SHAPES, Scenes, sample_scenes
from videoattn.demo.training import latents, text
from videoattn.demo.training.optimiser import Average, Optimiser, learning_rate, orthogonalise
from videoattn.demo.training.session import Session


def log_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("shape", [(2, 8, 24), (3, 24, 8), (1, 16, 16)])
def test_orthogonalised_matrices_have_like_singular_values(shape: tuple[int, ...]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert float(values.min()) > 0.3
    assert float(values.max()) < 1.5


def test_the_optimiser_fits_a_linear_map_and_resumes_exactly() -> None:
    torch.manual_seed(0)
    target = torch.randn(6, 10)

    def start() -> tuple[torch.nn.Linear, Optimiser]:
        torch.manual_seed(1)
        layer = torch.nn.Linear(10, 6)
        return layer, Optimiser(layer.named_parameters(), adam_only=("bias",), weight_decay=0.0)

    def run(layer: torch.nn.Linear, optimiser: Optimiser, steps: int) -> float:
        loss = torch.zeros(())
        for step in range(steps):
            loss = (layer.weight - target).square().mean() + layer.bias.square().mean()
            loss.backward()
            optimiser.step(0.1 * (1 - step / steps))
        return float(loss.detach())

    layer, optimiser = start()
    first = run(layer, optimiser, 1)
    saved = {k: v.clone() for k, v in layer.state_dict().items()}
    state = copy.deepcopy(optimiser.state_dict())
    last = run(layer, optimiser, 150)
    assert last < 0.1 * first

    again, resumed = start()
    again.load_state_dict(saved)
    resumed.load_state_dict(state)
    assert run(again, resumed, 150) == pytest.approx(last, rel=1e-5)


def test_averages_follow_and_come_back() -> None:
    layer = torch.nn.Linear(2, 2)
    average = Average(layer, 0.5)
    start = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1.0)
    average.update()
    moved = average.state_dict()["weight"] - start
    assert (moved > 0.5).all()
    assert (moved < 1.0).all()


def test_the_learning_rate_rises_holds_and_falls() -> None:
    assert learning_rate(1.0, 0, 10, 0.0, 0.5) == pytest.approx(0.1)
    assert learning_rate(1.0, 100, 10, 0.4, 0.5) == 1.0
    assert learning_rate(1.0, 100, 10, 0.75, 0.5) == pytest.approx(0.5)
    assert learning_rate(1.0, 100, 10, 1.0, 0.5) == 0.0


def test_a_session_goes_on_where_it_stopped(tmp_path) -> None:
    session = Session(tmp_path, "x", minutes=10, total_minutes=20, device="cpu")
    assert session.load() is None
    session.start()
    for _ in range(3):
        assert session.tick()
    session.save(live={"a": torch.ones(1)})
    later = Session(tmp_path, "x", minutes=10, total_minutes=20, device="cpu")
    state = later.load()
    assert state is not None
    assert later.step == 3
    assert later.before > 0


def test_averaged_weights_alone_start_a_stage(tmp_path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "x_average.pt")
    session = Session(tmp_path, "x", minutes=1, total_minutes=1, device="cpu")
    state = session.load()
    assert state is not None
    assert torch.equal(state["live"]["a"], torch.ones(1))
    assert session.step == 0


@pytest.mark.slow
def test_the_text_stage_learns_and_logs(tmp_path) -> None:
    text.train(tmp_path, minutes=0.12, batch_size=8)
    last = log_of(tmp_path)[-1]
    assert last["stage"] == "t5"
    assert len(last["swap_distances"]) == 2
    untrained = text.BindingHeads()
    batch = text.write_captions(random.Random(0), sample_scenes(np.random.default_rng(0), 32)).to("cpu")
    before = untrained(text.embed(text.build_text_encoder(), batch.ids), batch)
    assert last["part"] < float(before["part"].detach())
    assert (tmp_path / "t5.pt").exists()


def test_a_pool_holds_the_shares_asked_for() -> None:
    pool = latents.LatentPool.__new__(latents.LatentPool)
    pool.rng, pool.chunk, pool.two_shapes, pool.hard_share = np.random.default_rng(0), 400, 0.25, 0.5
    scenes = pool._scenes()
    assert len(scenes) == 400
    assert latents.difficulty(scenes)[200:].mean() > 1.2 * latents.difficulty(scenes)[:200].mean()
    assert 0.15 < scenes.present[:200, 1].mean() < 0.35


def test_scenes_are_difficult_by_motion_and_points() -> None:
    def scene(shape: str, motion: str) -> Scenes:
        pair = np.array([[SHAPES.index(shape), SHAPES.index("star")]])
        motions = np.array([[MOTIONS.index(motion), MOTIONS.index("circling")]])
        nothing = np.zeros((1, 2), dtype=int)
        return Scenes(nothing, pair, nothing, motions, np.array([[True, False]]), np.zeros(1, dtype=int))

    kinds = [
        ("square", "left"),
        ("cross", "up"),
        ("circle", "circling"),
        ("star", "rotating"),
        ("star", "circling"),
    ]
    values = [7 * latents.difficulty(scene(*kind)).item() for kind in kinds]
    assert values == pytest.approx([1, 2, 3.5, 3.5, 7])
    both = scene("square", "left")
    both.present[:] = True
    assert latents.difficulty(both).item() == 1


def test_losses_are_those_of_known_scenes() -> None:
    from videoattn.demo.training.losses import SIGMAS, losses

    said = losses(clips=24, chunk=8, seed=1)
    levels = [line.split() for line in said.splitlines()[3 : 3 + len(SIGMAS)]]
    assert [float(sigma) for sigma, *_ in levels] == list(SIGMAS)
    # Most of the loss is where the shape is, and a trained model is far from the loss of no model, about 2.
    assert all(float(share.rstrip("%")) > 50 and 0 < float(loss) < 1 for _, loss, share in levels)
    table = said.splitlines()[-8:]
    assert [row.split()[0] for row in table] == list(MOTIONS)
    assert 5 < sum(cell != "–" for row in table for cell in row.split()[1:]) <= 24


@pytest.mark.slow
def test_vae_and_transformer_stages_run_resume_and_export(tmp_path) -> None:
    from videoattn.demo.model import load_pipeline
    from videoattn.demo.training import dit, vae
    from videoattn.demo.training.export import export

    text.train(tmp_path, minutes=0.03, batch_size=8)
    vae.train(tmp_path, 0.02, 0.02, batch_size=1, device="cpu", check=2)
    small = {"batch_size": 1, "pool_size": 2, "device": "cpu", "check": 2}
    dit.train(tmp_path, 0.02, 1.0, **small)
    steps = torch.load(tmp_path / "dit.pt")["step"]
    dit.train(tmp_path, 0.02, 1.0, two_shapes=0.0, hard_share=0.5, **small)
    assert torch.load(tmp_path / "dit.pt")["step"] > steps > 0
    assert any(row.get("check", "").startswith("dit_") for row in log_of(tmp_path))
    export(tmp_path, tmp_path / "weights")
    pipe = load_pipeline(weights=tmp_path / "weights")
    assert pipe.transformer.config.in_channels == pipe.vae.config.latent_channels  # pyright: ignore
    exported = pipe.transformer.proj_in.weight  # pyright: ignore
    kept = torch.load(tmp_path / "dit_average.pt")["transformer.proj_in.weight"]
    assert torch.equal(exported, kept.float())


def test_shipped_weights_unpack_into_a_run_and_export_unchanged(tmp_path) -> None:
    from videoattn.demo.model import weights_path
    from videoattn.demo.training.export import export, unpack

    unpack(weights_path(), tmp_path)
    session = Session(tmp_path, "dit", minutes=1, total_minutes=1, device="cpu")
    assert session.load() is not None
    export(tmp_path, tmp_path / "weights")
    for part in ("transformer", "text_encoder", "vae"):
        (shipped,) = (weights_path() / part).glob("*.safetensors")
        first, second = load_file(shipped), load_file(tmp_path / "weights" / part / shipped.name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
