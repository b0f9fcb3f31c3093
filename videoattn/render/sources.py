"""Where a model comes from (demo, folder, hub id, single file) and what its configs say it can do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import lcm
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from videoattn.render.errors import RenderError, UsageError
from videoattn.render.job import RenderJob
from videoattn.render.places import expanded, kind_of, require_file, unreadable
from videoattn.render.sizes import Grid
from videoattn.typed_json import fit, parse

Family = Literal["ltx", "ltx2"]
Generation = Literal["0.9", "2.0", "2.3", "2.5"]
FAMILIES: dict[str, Family] = {
    "LTXVideoTransformer3DModel": "ltx",
    "LTX2VideoTransformer3DModel": "ltx2",
}
HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*$")
CONFIG_FILES = ["model_index.json", "*/config.json", "*/*_config.json"]
# LTXPipeline and LTX2Pipeline refuse sizes that 32 does not divide, whatever the VAE.
PIPELINE_PIXELS = 32

T = TypeVar("T")
Size = Annotated[int, Field(ge=1, lt=2**31)]
Truth = bool | Literal[0, 1]
# Library and class of a component, and what else a pipeline may say of it; nulls where it goes without.
Part = Annotated[tuple[Any, ...], Field(min_length=2)]


@dataclass(frozen=True, slots=True)
class ModelIndex:
    """What is read of a model_index.json; as in the configs below, other fields are diffusers' own."""

    class_name: Annotated[str | None, Field(alias="_class_name")] = "an unknown pipeline"
    transformer: Part | None = None
    vocoder: Part | None = None


@dataclass(frozen=True, slots=True)
class TransformerConfig:
    """What is read of transformer/config.json; the audio fields are LTX-2's."""

    num_layers: Size
    num_attention_heads: Size = 32
    attention_head_dim: Size = 64
    audio_num_attention_heads: Size = 32
    audio_attention_head_dim: Size = 64
    patch_size: Size = 1
    patch_size_t: Size = 1
    ff_bias: bool = True
    use_keyframes_abs_pos_embedding: bool = False
    perturbed_attn: bool = False


@dataclass(frozen=True, slots=True)
class VaeConfig:
    """What is read of vae/config.json."""

    patch_size: Size = 4
    patch_size_t: Size = 1
    spatio_temporal_scaling: Annotated[tuple[Truth, ...], Field(max_length=16)] | None = (True,) * 4
    spatial_compression_ratio: Size | None = None
    temporal_compression_ratio: Size | None = None
    timestep_conditioning: bool | None = False


@dataclass(frozen=True, slots=True)
class Source:
    """A place to load a pipeline from.

    `folder` is in `from_pretrained` layout; for a hub model it may hold nothing but the configs yet.
    `checkpoint` is the single file whose weights take the place of the folder's.
    """

    label: str
    folder: Path
    hub_id: str | None = None
    revision: str | None = None
    checkpoint: Path | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a model can make, from its configs; heads are `(number, head_dim)`."""

    family: Family
    generation: Generation
    grid: Grid
    sound: bool
    timestep_conditioned: bool
    layers: int
    video_heads: tuple[int, int] = (32, 128)
    audio_heads: tuple[int, int] = (32, 64)

    @property
    def name(self) -> str:
        """The model as the field calls it."""
        return "LTX-Video 0.9.x" if self.family == "ltx" else f"LTX-{self.generation}"


def unused(model: str, recipe: str) -> dict[str, str]:
    """The settings that a model of this kind, or this recipe, has no use for; each with what it belongs to.

    Raises UsageError if the model's path can't be looked at.
    """
    path = expanded(model)
    folder = model == "demo" or kind_of(path) == "folder"
    single = not folder and path.suffix == ".safetensors"
    found = {}
    if recipe != "distilled":
        found["upsampler"] = f"the distilled recipe, and this is {recipe}"
    if not single:
        found["components"] = "a single-file checkpoint, and this model is none"
    if folder or single or not HUB_ID.match(model):
        found["revision"] = "a hub model, and this one is none"
    return found


def find(job: RenderJob, *, local_files_only: bool = False) -> Source:
    """The source that `job.model` names, hub configs fetched; no weights are read.

    Raises UsageError when there is no such model, RenderError when the hub can't be reached.
    """
    text = job.model
    if text == "demo":
        from videoattn import demo

        try:
            return Source("demo", demo.weights_path())
        except FileNotFoundError as error:
            raise RenderError(first_line(error)) from None
    path = expanded(text)
    if text and kind_of(path) == "folder":
        return Source(text, path)
    if path.suffix in {".ckpt", ".pt", ".pth", ".bin"}:
        raise UsageError(f"cannot load {text}: weights must be safetensors, pickled files can run code")
    if path.suffix == ".safetensors":
        return _single_file(job, path, local_files_only)
    if HUB_ID.match(text):
        return _hub(text, job.revision, local_files_only)
    raise UsageError(
        f"unknown model '{text}': give demo, an existing folder, a .safetensors file or a hub id such as "
        "Lightricks/LTX-2"
    )


def _single_file(job: RenderJob, path: Path, local_files_only: bool) -> Source:
    require_file(path, f"no such file: {path}")
    components = job.components or _usual_components(path)
    rest = expanded(components)
    if kind_of(rest) == "folder":
        return Source(job.model, rest, checkpoint=path)
    if not HUB_ID.match(components):
        raise UsageError(f"--components {components}: no such folder, and no hub id")
    hub = _hub(components, None, local_files_only)
    return Source(job.model, hub.folder, hub.hub_id, checkpoint=path)


def _usual_components(path: Path) -> str:
    from diffusers.loaders.single_file_utils import fetch_diffusers_config

    from videoattn.render.weights import open_checkpoint

    tensors = open_checkpoint(path)
    repository = fetch_diffusers_config(tensors)["pretrained_model_name_or_path"]
    if "LTX" not in repository:
        raise UsageError(
            f"{path} does not look like an LTX checkpoint: if it is one, name the folder with the other "
            "parts by --components"
        )
    return repository


def _hub(hub_id: str, revision: str | None, local_files_only: bool) -> Source:
    from huggingface_hub import snapshot_download

    with hub_errors(hub_id):
        folder = snapshot_download(
            hub_id, revision=revision, allow_patterns=CONFIG_FILES, local_files_only=local_files_only
        )
    if not (Path(folder) / "model_index.json").is_file():
        raise UsageError(f"{hub_id} is not in diffusers layout: it has no model_index.json")
    return Source(hub_id, Path(folder), hub_id, revision)


class hub_errors:
    """Turns the hub's exceptions into one clear line each."""

    def __init__(self, hub_id: str) -> None:
        self._hub_id = hub_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is None:
            return
        from huggingface_hub import errors

        name = self._hub_id
        if isinstance(error, errors.GatedRepoError):
            raise RenderError(
                f"{name} is gated: accept its terms on huggingface.co and log in with `hf auth login`"
            ) from None
        if isinstance(error, errors.RevisionNotFoundError):
            raise UsageError(f"{name} has no such revision") from None
        if isinstance(error, (errors.RepositoryNotFoundError, errors.HFValidationError)):
            raise UsageError(
                f"unknown model '{name}': there is no such folder here and no such hub model"
            ) from None
        if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
            raise UsageError(
                f"unknown model '{name}': there is no such folder here, and it is not in the local hub cache "
                "while the hub is off or out of reach"
            ) from None
        if isinstance(error, (errors.HfHubHTTPError, ConnectionError, TimeoutError)):
            raise RenderError(f"cannot reach the hub for {name}: {first_line(error)}") from None


def describe(source: Source) -> ModelInfo:
    """What the model at `source` can make; reads configs only."""
    return _describe(source.folder)


@lru_cache(maxsize=32)
def _describe(folder: Path) -> ModelInfo:
    index = read_config(
        ModelIndex,
        folder / "model_index.json",
        f"{folder} is no diffusers pipeline: it has no model_index.json",
    )
    family = FAMILIES.get(str((index.transformer or (None, None))[1]))
    if family is None:
        raise UsageError(f"{folder} holds {index.class_name}: videoattn renders LTX-Video and LTX-2.x")
    transformer = transformer_config(folder)
    vae = vae_config(folder)
    if transformer.patch_size_t > 1:
        raise UsageError(
            f"{folder}: a transformer that groups frames (patch_size_t above 1) is not supported"
        )
    space, span = compression(vae)
    return ModelInfo(
        family,
        _generation(family, transformer),
        Grid(lcm(PIPELINE_PIXELS, space * transformer.patch_size), span),
        family == "ltx2" and (index.vocoder or (None, None))[0] is not None,
        bool(vae.timestep_conditioning),
        transformer.num_layers,
        (transformer.num_attention_heads, transformer.attention_head_dim),
        (transformer.audio_num_attention_heads, transformer.audio_attention_head_dim),
    )


def _generation(family: Family, config: TransformerConfig) -> Generation:
    if family == "ltx":
        return "0.9"
    if not config.ff_bias or config.use_keyframes_abs_pos_embedding:
        return "2.5"
    return "2.3" if config.perturbed_attn else "2.0"


def transformer_config(folder: Path) -> TransformerConfig:
    """The transformer's config of a pipeline; raises as `read_config` does."""
    return read_config(
        TransformerConfig, folder / "transformer" / "config.json", f"{folder} lacks transformer/config.json"
    )


def vae_config(folder: Path) -> VaeConfig:
    """The VAE's config of a pipeline; raises as `read_config` does."""
    return read_config(VaeConfig, folder / "vae" / "config.json", f"{folder} lacks vae/config.json")


def compression(config: VaeConfig) -> tuple[int, int]:
    """A VAE's compression in space and time from its config, derived as AutoencoderKLLTXVideo does."""
    halvings = sum(config.spatio_temporal_scaling or ())
    space = config.spatial_compression_ratio or config.patch_size * 2**halvings
    span = config.temporal_compression_ratio or config.patch_size_t * 2**halvings
    return space, span


def read_config(kind: type[T], path: Path, missing: str) -> T:
    """The fields of `kind` in a JSON file.

    Raises UsageError if the file can't be read, with `missing` where there is none, RenderError if it holds
    no JSON or something does not fit.
    """
    require_file(path, missing)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        value = parse(content)
    except ValueError as error:
        raise RenderError(f"cannot load {path}: it is no JSON ({error})") from None
    try:
        return fit(kind, value)
    except ValueError as error:
        raise RenderError(f"cannot load {path}: {error}") from None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, with what its colon announces; its type if it has none."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__
