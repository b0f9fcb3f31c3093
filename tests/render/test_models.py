"""Loading: every kind of source, every way a source can be broken, dtypes, offload, LoRA."""

import json
import shutil

import pytest
import torch
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

from tests.render.fixtures import SIZE
from tests.render.test_recipes import checked, render
from videoattn.render import devices, models, sources
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob

CPU = torch.device("cpu")
QUICK = {"num_inference_steps": 1, "guidance_scale": 1.0, **SIZE}


def load(folder, **values):
    prepared = checked(folder, **{**QUICK, **values})
    return models.load(prepared.source, prepared.info, prepared.job, CPU), prepared


def frames(folder, **values):
    loaded, prepared = load(folder, **values)
    models.place(loaded)
    return render(loaded, prepared)[0].frames


def copy(folder, target):
    shutil.copytree(folder, target)
    return target


def original_names(state):
    """A transformer's tensors under the names that Lightricks' checkpoints use."""
    renames = {
        "proj_in": "patchify_proj",
        "time_embed": "adaln_single",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
    }
    renamed = {}
    for name, tensor in state.items():
        for ours, theirs in renames.items():
            name = name.replace(ours, theirs)
        renamed[f"model.diffusion_model.{name}"] = tensor
    return renamed


@pytest.mark.parametrize("names", ["original", "diffusers"])
def test_a_single_file_gives_the_same_clip_as_the_folder(ltx_folder, tmp_path, names):
    state = load_file(ltx_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    checkpoint = tmp_path / "ltx.safetensors"
    save_file(original_names(state) if names == "original" else state, checkpoint)
    bare = copy(ltx_folder, tmp_path / "rest")
    (bare / "transformer" / "diffusion_pytorch_model.safetensors").unlink()
    loaded, prepared = load(checkpoint, components=str(bare))
    usual = load(ltx_folder)[0].pipe.transformer.state_dict()
    assert all(
        torch.equal(usual[name], tensor) for name, tensor in loaded.pipe.transformer.state_dict().items()
    )
    # Tensors mapped at another alignment add up in another order.
    assert torch.allclose(render(loaded, prepared)[0].frames, frames(ltx_folder), atol=1e-5)


def test_a_single_file_that_lacks_tensors_is_refused(ltx_folder, tmp_path):
    state = load_file(ltx_folder / "transformer" / "diffusion_pytorch_model.safetensors")
    state.pop("transformer_blocks.1.attn2.to_v.weight")
    save_file(original_names(state), tmp_path / "ltx.safetensors")
    with pytest.raises(RenderError, match="it lacks tensors of the transformer"):
        load(tmp_path / "ltx.safetensors", components=str(ltx_folder))


def test_a_single_file_without_a_transformer_is_refused(ltx_folder, tmp_path):
    save_file({"lora.down": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(RenderError, match="holds no LTX transformer"):
        load(tmp_path / "other.safetensors", components=str(ltx_folder))
    with pytest.raises(UsageError, match="does not look like an LTX checkpoint"):
        load(tmp_path / "other.safetensors")


def test_a_corrupt_file_is_named_before_anything_loads(ltx_folder, tmp_path):
    folder = copy(ltx_folder, tmp_path / "cut")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(
        RenderError, match=r"vae/diffusion_pytorch_model\.safetensors: the safetensors file is corrupt"
    ):
        load(folder)
    path.write_bytes(b"\xff" * 4000)
    with pytest.raises(RenderError, match="corrupt"):
        load(folder)


def test_missing_tensors_do_not_stay_random(ltx2_folder, tmp_path):
    folder = copy(ltx2_folder, tmp_path / "holes")
    path = folder / "connectors" / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    gone = sorted(state)[0]
    state.pop(gone)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(RenderError, match=gone.replace(".", r"\.")):
        load(folder)


def test_tensors_of_another_shape_are_refused(ltx_folder, tmp_path):
    folder = copy(ltx_folder, tmp_path / "other")
    config = json.loads((folder / "transformer" / "config.json").read_text())
    (folder / "transformer" / "config.json").write_text(json.dumps(config | {"caption_channels": 64}))
    with pytest.raises(RenderError, match="cannot load") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_pickled_weights_are_refused(ltx_folder, tmp_path):
    with pytest.raises(UsageError, match="safetensors, pickled files can run code"):
        checked(tmp_path / "model.ckpt")
    folder = copy(ltx_folder, tmp_path / "pickled")
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    torch.save(load_file(path), folder / "vae" / "diffusion_pytorch_model.bin")
    path.unlink()
    with pytest.raises(RenderError, match="cannot load"):
        load(folder)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("nothing", "unknown model 'nothing'"),
        ("./nothing/here", "unknown model"),
        ("nobody/nothing", "not in the local hub cache"),
        ("missing.safetensors", "no such file"),
        ("..", "no model_index.json"),
        ("a/b/c", "unknown model"),
    ],
)
def test_models_that_do_not_exist(model, message, tmp_path, monkeypatch):
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    with pytest.raises(UsageError, match=message):
        sources.describe(sources.find(RenderJob(model=model), local_files_only=True))


def test_another_models_folder_is_refused(ltx_folder, tmp_path):
    folder = copy(ltx_folder, tmp_path / "other")
    index = json.loads((folder / "model_index.json").read_text())
    index["_class_name"], index["transformer"] = "FluxPipeline", ["diffusers", "FluxTransformer2DModel"]
    (folder / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="holds FluxPipeline: videoattn renders"):
        checked(folder)
    (folder / "model_index.json").write_text("{")
    with pytest.raises(RenderError, match="is no JSON"):
        checked(folder)


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_dtype_is_the_parts_dtype_but_sound_stays_fp32(ltx2_folder, dtype, expected):
    loaded, _ = load(ltx2_folder, dtype=dtype)
    for part in ("transformer", "vae", "connectors", "text_encoder"):
        assert getattr(loaded.pipe, part).dtype == expected
    for part in ("audio_vae", "vocoder"):
        assert getattr(loaded.pipe, part).dtype == torch.float32


@pytest.mark.parametrize("folder", ["ltx_folder", "ltx2_folder"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_low_precision_stays_near_fp32(folder, dtype, request):
    path = request.getfixturevalue(folder)
    made, exact = frames(path, dtype=dtype).float(), frames(path)
    assert made.shape == exact.shape
    assert 0 < (made - exact).abs().mean() < 0.05


def test_fp8_stores_the_transformer_in_e4m3(ltx2_folder):
    loaded, _ = load(ltx2_folder, dtype="fp8")
    block = loaded.pipe.transformer.transformer_blocks[0]
    assert block.attn1.to_q.weight.dtype == torch.float8_e4m3fn
    assert loaded.pipe.vae.dtype == torch.bfloat16


@pytest.mark.parametrize("folder", ["ltx_folder", "ltx2_folder"])
def test_group_offload_changes_nothing(folder, request):
    path = request.getfixturevalue(folder)
    assert torch.equal(frames(path, offload="group", vae_tiling=False), frames(path))


def test_model_offload_needs_a_gpu(ltx_folder):
    with pytest.raises(UsageError, match="--offload model moves weights off a GPU"):
        load(ltx_folder, offload="model")


def test_parts_that_a_render_never_calls_are_not_loaded(ltx2_folder, tmp_path):
    folder = copy(ltx2_folder, tmp_path / "model")
    index = json.loads((folder / "model_index.json").read_text())
    index |= {"prompt_enhancer": ["transformers", "Gemma3ForConditionalGeneration"]}
    index |= {"duration_head": ["ltx2", "LTX2DurationHead"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    pipe = load(folder)[0].pipe
    assert (pipe.prompt_enhancer, pipe.duration_head) == (None, None)


def test_tiling_is_on_where_asked(ltx_folder):
    assert load(ltx_folder, vae_tiling=True)[0].pipe.vae.use_tiling
    assert load(ltx_folder, offload="group")[0].pipe.vae.use_tiling
    assert not load(ltx_folder)[0].pipe.vae.use_tiling


@pytest.fixture(scope="module")
def lora_file(ltx_folder, tmp_path_factory):
    """A LoRA of rank 4 over the transformer's projections, as diffusers saves it."""
    from diffusers import LTXPipeline

    pipe = LTXPipeline.from_pretrained(ltx_folder)
    pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_v"]))
    torch.manual_seed(0)
    for name, parameter in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    folder = tmp_path_factory.mktemp("lora")
    LTXPipeline.save_lora_weights(folder, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer))
    return folder / "pytorch_lora_weights.safetensors"


@pytest.mark.parametrize("dtype", ["fp32", "fp8"])
def test_a_lora_changes_the_clip_by_its_scale(ltx_folder, lora_file, dtype):
    plain = frames(ltx_folder, dtype=dtype)
    full = frames(ltx_folder, lora=str(lora_file), dtype=dtype)
    none = frames(ltx_folder, lora=f"{lora_file}:0", dtype=dtype)
    assert not torch.allclose(plain, full, atol=1e-3)
    assert torch.allclose(plain, none, atol=1e-5)


def test_two_loras_add_up(ltx_folder, lora_file):
    twice = frames(ltx_folder, lora=[f"{lora_file}:0.5", f"{lora_file}:0.5"])
    assert torch.allclose(twice, frames(ltx_folder, lora=str(lora_file)), atol=1e-4)


def test_loras_that_do_not_fit(ltx_folder, lora_file, tmp_path):
    with pytest.raises(UsageError, match=r"--lora .*none\.safetensors: no such file"):
        load(ltx_folder, lora=str(tmp_path / "none.safetensors"))
    (tmp_path / "lora.bin").write_bytes(b"x")
    with pytest.raises(UsageError, match="must be safetensors"):
        load(ltx_folder, lora=str(tmp_path / "lora.bin"))
    (tmp_path / "broken.safetensors").write_bytes(lora_file.read_bytes()[:300])
    with pytest.raises(RenderError, match="corrupt"):
        load(ltx_folder, lora=str(tmp_path / "broken.safetensors"))
    save_file({"somewhere.lora_A.weight": torch.zeros(4, 8)}, tmp_path / "foreign.safetensors")
    with pytest.raises(RenderError, match="--lora"):
        load(ltx_folder, lora=str(tmp_path / "foreign.safetensors"))


def test_devices():
    assert devices.pick_device("cpu") == CPU
    with pytest.raises(UsageError, match="unknown device 'gpu9'"):
        devices.pick_device("gpu9")
    # 300 is an index of 44 to torch, 999 one of -25.
    for name in ("cuda:99", "cuda:300", "cuda:999"):
        with pytest.raises(UsageError, match=f"^no device {name}: this machine has"):
            devices.pick_device(name)
    for name in (
        "mps",
        "xpu",
        "hpu",
        "meta",
        "vulkan",
        "privateuseone",
        "cpu:5",
        "cuda:",
        "cuda:01",
        "",
        "CUDA",
    ):
        with pytest.raises(UsageError, match=f"^unknown device '{name}': give cpu, cuda or cuda:N$"):
            devices.pick_device(name)
    assert devices.pick_dtype("auto", CPU) == "fp32"
    assert devices.pick_dtype("fp16", CPU) == "fp16"
