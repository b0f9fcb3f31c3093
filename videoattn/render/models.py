"""Loading a pipeline: dtypes, fp8 storage, LoRA, offload, tiling, compilation."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from math import lcm
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from diffusers.models._modeling_parallel import ContextParallelConfig
from diffusers.models.autoencoders.autoencoder_kl_ltx import AutoencoderKLLTXVideo
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import AutoencoderKLLTX2Audio
from diffusers.models.transformers.transformer_ltx import LTXVideoTransformer3DModel
from diffusers.models.transformers.transformer_ltx2 import LTX2VideoTransformer3DModel
from diffusers.pipelines.ltx.pipeline_ltx import LTXPipeline
from diffusers.pipelines.ltx2.latent_upsampler import LTX2LatentUpsamplerModel
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from videoattn.processors.parallel.degrees import Degrees
from videoattn.render.devices import DTYPES
from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded
from videoattn.render.sources import PIPELINE_PIXELS, ModelInfo, Source, first_line, hub_errors
from videoattn.render.weights import require_complete, require_intact, tensor_names

FP8_STORAGE = torch.float8_e4m3fn
# In bf16 the bandwidth-extending vocoder of LTX-2.3 is off by a third; both parts are small.
FP32_PARTS = ("audio_vae", "vocoder")
# Whole models that write prompts and guess durations, which a render does itself or not at all.
UNUSED_PARTS = ("prompt_enhancer", "duration_head")
CHECKED_PARTS = ("transformer", "vae", "connectors", "audio_vae", "vocoder")


@dataclass(slots=True)
class Loaded:
    """A pipeline ready to render, where and how it was loaded."""

    pipe: Any
    source: Source
    info: ModelInfo
    device: torch.device
    offload: str
    upsampler: Any = None

    @property
    def resident(self) -> bool:
        """Whether the renderer itself decides which parts are on the device."""
        return self.offload == "none" and self.device.type != "cpu"


def load(
    source: Source, info: ModelInfo, job: RenderJob, device: torch.device, *, local_files_only: bool = False
) -> Loaded:
    """Load the pipeline that a resolved job needs.

    The transformer is not compiled yet: attention processors are installed first, see `finish`.
    Raises RenderError in one line for anything that is missing or broken.
    """
    if job.offload == "model" and device.type == "cpu":
        raise UsageError(
            "--offload model moves weights off a GPU, and this render runs on the CPU: leave it out"
        )
    if source.hub_id is not None and source.checkpoint is None:
        source = _download(source, local_files_only)
    require_intact(source.folder)
    try:
        pipe = _pipeline(source, info, job, local_files_only)
        upsampler = _upsampler(source, job, local_files_only) if job.recipe == "distilled" else None
    except (RenderError, UsageError, MemoryError):
        raise
    except Exception as error:
        # What a config of another shape leads to in diffusers, transformers and tokenizers is any of these.
        raise RenderError(f"cannot load {source.label}: {first_line(error)}") from None
    pipe.set_progress_bar_config(disable=True)
    step = lcm(PIPELINE_PIXELS, pipe.vae_spatial_compression_ratio * pipe.transformer_spatial_patch_size)
    if (step, pipe.vae_temporal_compression_ratio) != (info.grid.pixels, info.grid.frames):
        raise RenderError(f"cannot load {source.label}: its VAE's config and code disagree about compression")
    _add_loras(pipe, job, local_files_only)
    if job.dtype == "fp8":
        pipe.transformer.enable_layerwise_casting(storage_dtype=FP8_STORAGE, compute_dtype=DTYPES["fp8"])
    if job.vae_tiling:
        pipe.vae.enable_tiling()
    return Loaded(pipe, source, info, device, job.offload, upsampler)


def _download(source: Source, local_files_only: bool) -> Source:
    assert source.hub_id is not None
    with hub_errors(source.hub_id):
        try:
            folder = DiffusionPipeline.download(
                source.hub_id,
                revision=source.revision,
                use_safetensors=True,
                local_files_only=local_files_only,
                **dict.fromkeys(UNUSED_PARTS),
            )
        except OSError as error:
            raise RenderError(f"cannot load {source.hub_id}: {first_line(error)}") from None
    return Source(source.label, Path(folder), source.hub_id, source.revision)


def _pipeline(source: Source, info: ModelInfo, job: RenderJob, local_files_only: bool) -> Any:
    dtype = DTYPES[job.dtype]
    dtypes: Any = dtype
    if info.family == "ltx2":
        dtypes = {"default": dtype, **dict.fromkeys(FP32_PARTS, torch.float32)}
    parts = _checkpoint_parts(source, info, dtype, local_files_only) if source.checkpoint else {}
    cls = LTX2Pipeline if info.family == "ltx2" else LTXPipeline
    parts |= dict.fromkeys(set(UNUSED_PARTS) & set(cls._optional_components))
    where = source.folder
    if source.checkpoint is not None and source.hub_id is not None:
        where = source.hub_id
    pipe = cls.from_pretrained(
        where, torch_dtype=dtypes, use_safetensors=True, local_files_only=local_files_only, **parts
    )
    for name in CHECKED_PARTS:
        module = getattr(pipe, name, None)
        if module is not None and name not in parts:
            require_complete(name, module, source.folder)
    return pipe


def _checkpoint_parts(
    source: Source, info: ModelInfo, dtype: torch.dtype, local_files_only: bool
) -> dict[str, Any]:
    """The components whose weights a single file holds, built by the configs of folder or hub model."""
    assert source.checkpoint is not None
    names = tensor_names(source.checkpoint)
    if info.family == "ltx2":
        classes: dict[str, Any] = {
            "transformer": LTX2VideoTransformer3DModel,
            "vae": AutoencoderKLLTX2Video,
            "audio_vae": AutoencoderKLLTX2Audio,
        }
    else:
        classes = {"transformer": LTXVideoTransformer3DModel, "vae": AutoencoderKLLTXVideo}
    present = {
        "transformer": any("transformer_blocks." in name for name in names),
        "vae": any(name.startswith("vae.") for name in names),
        "audio_vae": any(name.startswith("audio_vae.") for name in names),
    }
    if not present["transformer"]:
        raise RenderError(f"{source.checkpoint} holds no LTX transformer")
    parts = {}
    for name, cls in classes.items():
        if not present[name]:
            continue
        try:
            part = cls.from_single_file(
                str(source.checkpoint),
                config=source.hub_id or str(source.folder),
                subfolder=name,
                torch_dtype=torch.float32 if name in FP32_PARTS else dtype,
                local_files_only=local_files_only,
            )
        except NotImplementedError:
            # What the file lacks has stayed on the meta device, from where nothing can be moved.
            raise RenderError(f"cannot load {source.checkpoint}: it lacks tensors of the {name}") from None
        parts[name] = part
    return parts


def _upsampler(source: Source, job: RenderJob, local_files_only: bool) -> Any:
    place: str | Path = job.upsampler or source.hub_id or source.folder
    own = expanded(place)
    options: dict[str, Any] = {"torch_dtype": DTYPES[job.dtype], "local_files_only": local_files_only}
    if job.upsampler is None and source.hub_id is not None:
        options["revision"] = source.revision
    if (own / "config.json").is_file():
        return LTX2LatentUpsamplerModel.from_pretrained(own, use_safetensors=True, **options)
    try:
        return LTX2LatentUpsamplerModel.from_pretrained(
            place, subfolder="latent_upsampler", use_safetensors=True, **options
        )
    except OSError:
        raise UsageError(
            f"the distilled recipe needs a latent upsampler, and {place} has no latent_upsampler "
            "folder: name one by --upsampler"
        ) from None


def _add_loras(pipe: Any, job: RenderJob, local_files_only: bool) -> None:
    names, scales = [], []
    for index, lora in enumerate(job.loras):
        path = expanded(lora.source)
        options: dict[str, Any] = {"local_files_only": local_files_only, "use_safetensors": True}
        where: str | Path = lora.source
        if path.is_file():
            tensor_names(path)
            where, options["weight_name"] = path.parent, path.name
        elif path.is_dir():
            require_intact(path)
            where = path
        name = f"lora_{index}"
        try:
            with hub_errors(lora.source):
                pipe.load_lora_weights(where, adapter_name=name, **options)
        except (RenderError, UsageError, MemoryError):
            raise
        except Exception as error:
            raise RenderError(f"--lora {lora.source}: {first_line(error)}") from None
        if not any(name in adapters for adapters in pipe.get_list_adapters().values()):
            raise RenderError(f"--lora {lora.source}: none of its tensors belong to this model")
        names.append(name)
        scales.append(lora.scale)
    if names:
        pipe.set_adapters(names, scales)


def place(loaded: Loaded) -> None:
    """Put the parts, but for a resident text encoder, where the offload setting wants them."""
    pipe, device = loaded.pipe, loaded.device
    if loaded.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif loaded.offload == "group":
        for name, part in pipe.components.items():
            if isinstance(part, torch.nn.Module):
                _offload_groups(name, part, device)
    elif device.type != "cpu":
        for name, part in pipe.components.items():
            if isinstance(part, torch.nn.Module) and name != "text_encoder":
                part.to(device)
    if loaded.upsampler is not None:
        loaded.upsampler.to(device)


def _offload_groups(name: str, part: torch.nn.Module, device: torch.device) -> None:
    options: dict[str, Any] = {"onload_device": device, "offload_device": torch.device("cpu")}
    if name == "transformer":
        options |= {"offload_type": "block_level", "num_blocks_per_group": 1}
        options["use_stream"] = device.type == "cuda"
    else:
        # VAEs are entered by encode() and decode(), where groups that a forward would fetch stay away.
        options["offload_type"] = "leaf_level"
    apply_group_offloading(part, **options)


def share_out(loaded: Loaded, degrees: Degrees) -> None:
    """Make this process one of the ranks that share the transformer's tokens; after `videoattn.install`."""
    config = ContextParallelConfig(ulysses_degree=degrees.ulysses, ring_degree=degrees.ring)
    loaded.pipe.transformer.enable_parallelism(config=config)


def release(loaded: Loaded) -> None:
    """Drop a pipeline's memory."""
    loaded.pipe = None
    loaded.upsampler = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def quiet() -> None:
    """Silence diffusers' and transformers' own bars and notices; the render reports for them."""
    import transformers

    # Its replacement does not exist in every diffusers of the supported range.
    warnings.filterwarnings("ignore", message="`torch_dtype` is deprecated", category=FutureWarning)
    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
