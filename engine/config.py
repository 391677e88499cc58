"""The configuration: YAML in configs/, checked here, once, before any work starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from engine.core.errors import ConfigError, did_you_mean, first_line, printable, shown
from engine.install_paths import ROOT

AUTO = "auto"
Activations = Literal["bfloat16", "int8"]
"""The type to which activations are rounded before a matrix multiplication."""
ActivationsOption = Literal["auto", "bfloat16", "int8"]
"""One of these types, or the one that a trial at the first load finds best for the model and the processor."""
KVType = Literal["auto", "q8_0"]
"""How keys and values are kept: in the model's own type, or in 8 bits."""
Weights = Literal["auto", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]
"""The type of the target's matrices, the largest first."""
HomePath = Annotated[str, AfterValidator(os.path.expanduser)]
"""A path, or a name. ~ at its beginning is the user's home: no shell replaces it in --set KEY=~/x or in YAML."""
DEMO = ROOT / "configs" / "demo.yaml"


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _may_be_empty(cls, values: Any) -> Any:
        """Take a section that is null for an empty one: in YAML, a section whose keys are all comments is null."""
        return {} if values is None else values


class GrowthConfig(_Section):
    """How a draft head's tree grows (`drafters.heads.growth.policies`).

    policy: published is that of the method's paper; None: adaptive for heads, the chain for sps. tree: for `static`.
    depth: layers of `dynamic`, and the most of `adaptive` that a GPU drafts at once. top_k: candidates after each node
    (`talon`: width of the first layer). mu: gate threshold of `talon`, the rule of its paper, relative to the best of a
    layer, and of `adaptive`, our variant, which compares c(v) with mu (with what a row costs, where that is less, or
    half of that, where that is more).
    """

    policy: Literal["published", "static", "dynamic", "talon", "adaptive"] | None = None
    tree: Literal["eagle_25", "medusa_63"] = "eagle_25"
    depth: int = Field(7, ge=0, le=64)
    top_k: int = Field(10, ge=1, le=64)
    mu: float = Field(0.03, ge=0, le=1)


class DrafterConfig(_Section):
    """Options of the drafter named by `method`; each method reads those that concern it.

    budget: maximum nodes of a tree, root included. path: the draft model or head, with {method} for the method's name;
    auto: those that come with a model that Talon knows. tuned: a folder of heads, each in one of its method's name,
    which come before those of path; auto: those that `talon tune` has made for the model, unless path names others.
    threads: size of its torch pool, None: an even share of the machine's cores; in sequential mode the verifier's are
    used. length: tokens of a drafted chain, None: 10 for pld and 5 for sps, whose tokens cost a forward each. branches:
    width of the SPS tree at each level, e.g. [3, 2, 1]; empty drafts a chain. growth: of draft heads. shared_noise:
    heads and `suffix` rank candidates by the noise of the target's own draw.
    head, memories: the methods that `hybrid` merges, one draft model and any number of retrieval drafters; head
    auto: the method of the head that the file of the path or else the model's own brings, or of the assistant that lies
    beside the model, otherwise the best that Talon has trained for the model; one that was tuned comes first.
    vocabulary: the most tokens that mtp and assistant draft. datastore: a folder made by "talon index build". answers:
    a datastore of the target's own answers, which `suffix` treats like its earlier answers; auto: that of a model that
    Talon knows; null: none. share_answers: `talon serve` drafts for every client from what others were answered;
    clients can then tell from the speed of an answer what others were told.
    learned: a folder of block heads, each for the requests of one owner, which `talon serve --learn` sets and fills;
    `hybrid` takes them over while it drafts.
    """

    budget: int = Field(60, ge=2, le=1024)
    head: str = AUTO
    memories: tuple[str, ...] = ("suffix",)
    vocabulary: int = Field(32_000, ge=16)
    datastore: HomePath | None = None
    answers: HomePath | None = AUTO
    share_answers: bool = False
    learned: HomePath | None = None
    growth: GrowthConfig = GrowthConfig()
    shared_noise: bool = True
    path: HomePath | None = AUTO
    tuned: HomePath | None = AUTO
    threads: int | None = Field(None, ge=1)
    length: int | None = Field(None, ge=1, le=64)
    branches: Annotated[tuple[Annotated[int, Field(ge=1, le=64)], ...], Field(max_length=64)] = ()

    @property
    def answers_folder(self) -> str | None:
        """The folder of answers; None if there are none, or while `auto` is not resolved."""
        return None if self.answers == AUTO else self.answers

    def weights(self, method: str) -> str | None:
        """Return the path of the weights of that head or draft model; None if not set, or while `auto` is
        not resolved.
        """
        if self.tuned not in (None, AUTO) and (tuned := Path(str(self.tuned), method)).is_dir():
            return str(tuned)
        return None if self.path is None or self.path == AUTO else self.path.replace("{method}", method)


class VerifierConfig(_Section):
    """Options of the verifier and its target.

    threads: size of its torch pool, None: the cores the drafter leaves. prefill_chunk: prompt tokens read in one
    forward; fewer while others decode. max_running: requests that share forwards; the others wait. kv_memory: bytes for
    keys and values of all requests, None: a quarter of free memory. kv_type: q8_0 rounds keys and values to 8 bits, in
    groups of 32 dimensions with one scale: nearly twice as many fit, and plain decoding's own text is a slightly
    different one; auto keeps the model's type. draft_timeout_s: after this long without an answer the drafter counts as
    hung, and requests continue without it until its next message. cut: verify only those nodes of calibrated drafters'
    trees that pay for their time, and rest a draft model that does not. cache: a folder in which keys, values and
    answers outlive the process; cache_gb: gigabytes that it may take. simulated_latency_ms: a wait that uses no CPU
    after every forward of the target, in place of an accelerator's time; what is measured with it is a simulation.
    """

    threads: int | None = Field(None, ge=1)
    prefill_chunk: int = Field(512, ge=1)
    max_running: int = Field(32, ge=1)
    kv_memory: int | None = Field(None, ge=1 << 16)
    kv_type: KVType = "auto"
    draft_timeout_s: float = Field(1.0, gt=0, le=3600)
    cut: bool = True
    cache: HomePath | None = Field(None, min_length=1)
    cache_gb: float = Field(10.0, gt=0)
    simulated_latency_ms: float = Field(0.0, ge=0, le=60_000)


class TcpConfig(_Section):
    """The link between verifier and drafter with `transport: tcp`.

    endpoint: the verifier binds it, tcp://ADDRESS:PORT; 0.0.0.0 is every address of the machine. keys: a folder made by
    "talon keys". insecure: run without keys; anyone who reaches the port can then read every prompt. remote: drafters
    connect from other machines ("talon drafter"); otherwise the engine starts one here.
    """

    endpoint: str = Field("tcp://127.0.0.1:7777", pattern=r"^tcp://[^/\s]+:[1-9][0-9]{0,4}$")
    keys: HomePath | None = None
    insecure: bool = False
    remote: bool = False


class QueueConfig(_Section):
    """How many requests the engine accepts. size: requests accepted at once. full: whether a further `generate` waits
    or raises QueueFull.
    """

    size: int = Field(256, ge=1)
    full: Literal["wait", "refuse"] = "wait"


class Config(_Section):
    """Everything `Engine.start` needs.

    model: a Hugging Face directory or hub id, a GGUF file, or a name that `talon models list` knows. chat_template: a
    Jinja file for a model that has none, or in place of its own. weights: the model's own, or quantise a safetensors
    checkpoint as it is loaded, which makes another model of it, whose own text is kept exactly. activations: int8
    rounds the rows that matrices in blocks are multiplied with to 8 bits in groups of 32, which makes plain decoding's
    own text a slightly different one, and few rows faster on most processors; auto measures once, and keeps bfloat16
    unless 8 bits are clearly faster (`engine.model.trial.activations`). method: which drafter
    (`drafters.registry`). mode: drafter and verifier in turns (sequential), both at once (async), or whichever proves
    faster (auto, which is sequential for retrieval alone, on a CPU with fewer than four cores, and on a GPU with a head
    that drafts behind the target's walks). transport: workers as threads (inproc), as processes (ipc), or as processes
    of which the drafter may be on another machine (tcp); auto is ipc, or inproc where drafter and verifier use one GPU
    at the same time. trace: a file for a timeline of the workers, without remote drafters. start_timeout_s: for the
    workers to load. heartbeat_timeout_s: a worker that is silent for longer is killed and replaced; workers send a
    heartbeat every 0.5 s, but not during a forward.
    """

    model: HomePath = "smollm2-135m"
    chat_template: HomePath | None = None
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    weights: Weights = "auto"
    activations: ActivationsOption = "auto"
    method: str = "suffix"
    mode: Literal["sequential", "async", "auto"] = "auto"
    transport: Literal["auto", "inproc", "ipc", "tcp"] = "auto"
    drafter: DrafterConfig = DrafterConfig()
    verifier: VerifierConfig = VerifierConfig()
    queue: QueueConfig = QueueConfig()
    tcp: TcpConfig = TcpConfig()
    trace: HomePath | None = None
    start_timeout_s: float = Field(300, ge=1)
    heartbeat_timeout_s: float = Field(20, ge=1)

    @model_validator(mode="after")
    def _tcp_is_private(self) -> Config:
        if self.transport == "tcp" and self.tcp.keys is None and not self.tcp.insecure:
            raise ValueError("tcp.keys: transport tcp needs keys; run: talon keys DIR, and set tcp.keys=DIR")
        return self

    @property
    def remote(self) -> bool:
        """Whether the drafter runs on another machine."""
        return self.transport == "tcp" and self.tcp.remote

    @property
    def simulation(self) -> str:
        """The suffix of every number shown: empty unless the target's latency is simulated."""
        latency_ms = self.verifier.simulated_latency_ms
        return f", simulated target latency +{latency_ms:g} ms" if latency_ms else ""


def load(source: str | Path | Mapping[str, Any] | Config, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration from a YAML file, a dict or a Config, with `overrides` applied (dots reach into
    sections).

    Values that start with "./" or "../" in a file are relative to that file. Raises ConfigError, one line.
    """
    if isinstance(source, Config):
        values = source.model_dump()
    elif isinstance(source, Mapping):
        values = dict(source)
    elif isinstance(source, str | Path):
        values = _read(Path(source))
    else:
        raise ConfigError(f"config={shown(source)}: give a file, a mapping or a Config")
    for key, value in (overrides or {}).items():
        _assign(values, key.split("."), value)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None


def parse_assignment(text: str) -> tuple[str, Any]:
    """Split `drafter.budget=40` into (key, value); the value is read as YAML."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {printable(text, 100)}: write KEY=VALUE, for example --set drafter.budget=40")
    try:
        return key, yaml.safe_load(value)
    except (yaml.YAMLError, ValueError):  # ValueError: there is no such date
        raise ConfigError(
            f"--set {printable(key, 100)}: {shown(value)} is not YAML; quote it or close its brackets"
        ) from None


def _read(path: Path) -> dict[str, Any]:
    if not path.exists() and (ROOT / path).is_file():
        path = ROOT / path  # one of Talon's own files, wherever the command runs
    try:
        values = yaml.safe_load(path.read_text(encoding="utf8"))
    except OSError as error:
        raise ConfigError(f"config={path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"config={path}: is not YAML: {yaml_error(error)}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config={path}: must hold keys and values, for example `method: suffix`")
    return _resolve(values, path.parent)  # type: ignore[no-any-return]


def yaml_error(error: Exception) -> str:
    """Return what is wrong in a YAML file, after its line where that is known."""
    mark = getattr(error, "problem_mark", None)
    return f"{'' if mark is None else f'line {mark.line + 1}: '}{first_line(error)}"


def _resolve(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(item, folder) for key, item in value.items()}
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


def _assign(values: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        section = {} if values.get(key) is None else values[key]
        if isinstance(section, BaseModel):
            section = section.model_dump()
        if not isinstance(section, dict):
            raise ConfigError(f"{'.'.join(keys)}: {key} is a value, not a section")
        values[key] = section = dict(section)
        values = section
    values[keys[-1]] = value


def _explain(error: ValidationError) -> str:
    """Explain the first problem as `key=value: what to do`."""
    first = error.errors()[0]
    if first["type"] == "value_error":  # one of our own errors, which names the key
        return first["msg"].removeprefix("Value error, ")
    key = printable(".".join(str(part) for part in first["loc"]), 100)
    if first["type"] == "extra_forbidden":
        section: type[BaseModel] = Config
        for part in first["loc"][:-1]:
            section = section.model_fields[str(part)].annotation  # type: ignore[assignment]
        above, dot, name = key.rpartition(".")
        known = list(section.model_fields)
        return f"{key}: unknown configuration key" + (
            did_you_mean(name, known, above + dot) or f"; known: {', '.join(known)}"
        )
    return f"{key}={shown(first['input'])}: {first['msg'][0].lower()}{first['msg'][1:]}"
