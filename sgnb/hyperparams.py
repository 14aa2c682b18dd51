"""What a run is told: one frozen, validated record, from which the form, the command line and the errors follow.

Keys and meanings are SuperGradients' (`training_hyperparams`, also called `training_params`), so that its recipes can
be brought along. Unlike there, an unknown key is an error, and all problems are reported together.
"""

from __future__ import annotations

import difflib
import math
import numbers
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

Where = tuple[str | int, ...]

# SuperGradients still accepts these older names of its schedules and warm-ups.
_OLD_NAMES = {
    "step": "StepLRScheduler",
    "poly": "PolyLRScheduler",
    "cosine": "CosineLRScheduler",
    "exp": "ExponentialLRScheduler",
    "function": "FunctionLRScheduler",
    "linear_epoch_step": "LinearEpochLRWarmup",
    "linear_batch_step": "LinearBatchLRWarmup",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One thing that is wrong with a record: where, what was expected, what was given."""

    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


class HyperparamsError(ValueError):
    """Some values of a record are not acceptable; `problems` lists all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean ...?" for the closest of `known`, or an empty string."""
    names = {name.lower(): name for name in known}
    matches = difflib.get_close_matches(word.lower(), list(names), n=1)
    return f"; did you mean {names[matches[0]]}?" if matches else ""


class Record(BaseModel):
    """A frozen, keyword-only record that reports all its problems at once, with dotted names."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, arbitrary_types_allowed=True
    )

    def __init__(self, /, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            details = error.errors(include_url=False)
            problems = _problems_of(type(self), values, details)
            wrong = {str(detail["loc"][0]) for detail in details if detail["loc"]}
            good = {key: value for key, value in values.items() if key not in wrong}
            if any(detail["type"] == "missing" for detail in details):  # Without it there is nothing to contradict.
                raise HyperparamsError(problems) from None
            try:  # The contradictions among the values that are right by themselves belong in the same report.
                type(self)(**good)
            except HyperparamsError as more:
                problems += [problem for problem in more.problems if problem not in problems]
            except ValidationError:
                raise HyperparamsError(problems) from None
            raise HyperparamsError(problems) from None
        contradictions = [*_infinities_in(self), *self._contradictions()]
        if contradictions:
            raise HyperparamsError(contradictions)

    @classmethod
    def _prefix(cls) -> str:
        return ""

    def _contradictions(self) -> list[Problem]:
        return []

    def changed(self) -> dict[str, Any]:
        """Return the values that differ from the defaults, nested records as dicts of their changed values."""
        return _changed(self)

    def replace(self, **changes: Any) -> Self:
        """Return a copy with `changes`, validated as a whole."""
        values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**values, **changes})


def _changed(record: BaseModel) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for name, field in type(record).model_fields.items():
        value = getattr(record, name)
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(value, BaseModel):
            nested = _changed(value)
            if nested:
                changed[name] = nested
        elif field.is_required() or type(value) is not type(default) or value != default:
            changed[name] = _own(value)
    return changed


def _own(value: Any) -> Any:
    """Return a copy that shares no mapping or list with `value`; tuples become lists, numpy's scalars numbers."""
    if isinstance(value, Mapping):
        return {key: _own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_own(item) for item in value]
    if isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    return float(value) if isinstance(value, numbers.Real) else value


def _infinities_in(record: Record) -> list[Problem]:
    """Return the problems that pydantic does not see: infinite numbers and NaN inside mappings and lists."""
    return [
        Problem(where=where, message=f"expected a finite number, got {value!r}")
        for name in type(record).model_fields
        if not isinstance(getattr(record, name), BaseModel)
        for where, value in _leaves(getattr(record, name), f"{record._prefix()}.{name}".removeprefix("."))
        if isinstance(value, float) and not math.isfinite(value)
    ]


def _leaves(value: object, where: str) -> Iterator[tuple[str, object]]:
    """Yield (dotted name, value) of all that lies in nested mappings and lists."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{where}.{index}")
    else:
        yield where, value


def _problems_of(record: type[Record], values: Mapping[str, Any], details: list[ErrorDetails]) -> list[Problem]:
    problems: list[Problem] = []
    for detail in details:
        given = detail.get("ctx", {}).get("error")
        if isinstance(given, HyperparamsError):  # A nested record was built by hand in a validator.
            problems += given.problems
            continue
        where = tuple(part for part in detail["loc"] if not _names_a_union_branch(part, values, detail["loc"]))
        dotted = ".".join(map(str, ([record._prefix()] if record._prefix() else []) + list(where)))
        problem = Problem(where=dotted, message=_message(record, where, detail))
        earlier = next((p for p in problems if p.where == dotted), None)
        if earlier is not None and problem.message.startswith("expected ") and earlier.message.startswith("expected "):
            need, _, got = earlier.message.rpartition(", got ")
            other = problem.message.rpartition(", got ")[0].removeprefix("expected ")
            message = need if other in need else f"{need} or {other}"
            problems[problems.index(earlier)] = Problem(where=dotted, message=f"{message}, got {got}")
        elif problem not in problems:
            problems.append(problem)
    # Of a union, the branch that went deeper is the one that was meant.
    return [p for p in problems if not any(other.where.startswith(f"{p.where}.") for other in problems)]


def _names_a_union_branch(part: str | int, values: Mapping[str, Any], loc: Where) -> bool:
    """Tell pydantic's own path parts (`float`, `dict[str,...]`, `[key]`) from the user's keys."""
    if loc.index(part) == 0 or isinstance(part, int):
        return False
    value: Any = values
    for key in loc[: loc.index(part)]:
        if isinstance(value, Mapping) and key in value:
            value = value[key]
    known = isinstance(value, Mapping) and part in value
    return (not known and not part.isidentifier()) or part in ("float", "int", "str", "bool", "none", "[key]")


_NEEDS = {
    "bool_type": "True or False",
    "bool_parsing": "True or False",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "a text",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "finite_number": "a finite number",
    "none_required": "null",
}
_SHOWN = 120  # Characters of a wrong value that a message repeats.
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _message(record: type[BaseModel], where: Where, detail: ErrorDetails) -> str:
    kind, given, ctx = detail["type"], detail["input"], detail.get("ctx", {})
    got = _shown(given)
    text = detail["msg"].removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = f"no such key{nearest(str(where[-1]), _record_at(record, where[:-1]).model_fields)}"
    elif kind == "missing":
        message = "is required, and is missing"
    elif kind == "literal_error":
        alternatives = str(ctx["expected"]).replace(" or ", ", ")
        message = f"expected one of {alternatives}, got {got}{_hint_for_alternatives(given, alternatives)}"
    elif kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        message = f"expected {words} {ctx[key]:g}, got {got}"
    elif kind in _NEEDS:
        message = f"expected {_NEEDS[kind]}, got {got}{_hint_for_numbers(kind, given)}"
    elif kind == "string_pattern_mismatch":
        message = f"expected a plain file name, got {got}"
    else:
        message = text if kind == "value_error" else f"{text[0].lower()}{text[1:]}, got {got}"
    return message


def _shown(value: object) -> str:
    """Return the repr of a value, cut where a report would become unreadable."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def _hint_for_alternatives(given: object, alternatives: str) -> str:
    if not isinstance(given, str):
        return ""
    if "|" in given:
        return " (write one of the alternatives, not all of them)"
    return nearest(given, [name.strip("'") for name in alternatives.split(", ")])


def _hint_for_numbers(kind: str, given: object) -> str:
    if kind == "int_type" and isinstance(given, str) and given.strip().lstrip("+-").isdecimal():
        return f" (a text; write {given.strip()} without quotes)"
    return ""


def _record_at(record: type[BaseModel], where: Where) -> type[BaseModel]:
    for part in where:
        annotation = record.model_fields[str(part)].annotation if str(part) in record.model_fields else None
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            record = annotation
    return record


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _modern_name(value: object) -> object:
    return _OLD_NAMES.get(value, value) if isinstance(value, str) else value


def _number_from_text(value: object) -> object:
    # PyYAML follows YAML 1.1, where `1e-3` is a text. People write it all the time, and it can mean only one thing.
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _number_from_numpy(value: object) -> object:
    return value if isinstance(value, bool) or not isinstance(value, numbers.Integral) else int(value)


Positive = Annotated[float, BeforeValidator(_number_from_text), Field(gt=0)]
NonNegative = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0)]
Fraction = Annotated[float, BeforeValidator(_number_from_text), Field(ge=0, le=1)]
Count = Annotated[int, BeforeValidator(_number_from_numpy), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(_number_from_numpy), Field(ge=1)]
Arguments = Annotated[dict[str, Any], AfterValidator(_own)]
Named = Annotated[Any, AfterValidator(_own)]  # A name, {name: {arguments}}, or an object.
Metrics = Annotated[tuple[Named, ...], BeforeValidator(_as_tuple)]
FileName = Annotated[str, Field(pattern=r"^[\w.\-]+$")]
Schedule = Literal[
    "StepLRScheduler", "PolyLRScheduler", "CosineLRScheduler", "ExponentialLRScheduler", "FunctionLRScheduler"
]
Switch = Annotated[
    Literal["auto", "off"], BeforeValidator(lambda value: "off" if value is False else value)
]  # YAML 1.1
Mode = Literal["default", "lite", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "RMSpropTF", "Lamb", "Lion")


def _option(default: Any, description: str, *, group: str, unit: str = "", main: bool = False) -> Any:
    """Declare a field. `main` options stand open in the form, the rest of a group is folded."""
    return Field(default, description=description, json_schema_extra={"group": group, "unit": unit, "main": main})


class EmaParams(Record):
    """How the weights are averaged (SuperGradients' `ema_params`)."""

    decay: Fraction = Field(0.9999, description="Share of the average that is kept at each update, at full strength.")
    decay_type: Literal["constant", "threshold", "exp"] = Field(
        "exp", description="How the decay grows to its full strength over the run's updates."
    )
    beta: Positive = Field(
        15.0, description="How fast decay_type exp grows: decay * (1 - exp(-beta * update / updates))."
    )
    validate_raw: bool = Field(False, description="Validate the weights without averaging as well.")

    @classmethod
    def _prefix(cls) -> str:
        return "training_hyperparams.ema_params"


class TorchCompileOptions(Record):
    """Arguments of `torch.nn.Module.compile`."""

    mode: Mode | None = Field(None, description="The same as torch_compile_mode.")
    fullgraph: bool = Field(False, description="Fail on a graph break instead of running the broken part eagerly.")
    dynamic: bool | None = Field(
        None, description="None: the batch dimension alone may vary, so two graphs are enough."
    )
    backend: str = Field("inductor", description="The compiler behind the graph.")
    options: Arguments | None = Field(None, description="Options of the backend; not together with a mode.")
    disable: bool = Field(False, description="Make torch.compile do nothing.")

    @classmethod
    def _prefix(cls) -> str:
        return "training_hyperparams.torch_compile_options"


class TrainingHyperparams(Record):
    """All that a `Trainer` is told besides the model and the loaders. `{}` trains a classifier."""

    # Precision
    mixed_precision: bool = _option(
        False, "Forward pass in a 16-bit dtype where the device has one.", group="precision", main=True
    )
    mixed_precision_dtype: Literal["auto", "bfloat16", "float16"] = _option(
        "auto", "auto: bfloat16 where the device computes in it, else float16 on a GPU.", group="precision"
    )
    matmul_precision: Literal["ieee", "tf32"] | None = _option(
        None,
        "float32 products and convolutions on a GPU: exact, or TensorFloat-32. None: as torch has it.",
        group="precision",
    )
    channels_last: bool = _option(False, "Images and convolutions in channels-last layout.", group="precision")
    # Compile
    torch_compile: bool = _option(False, "Compile the model with torch.compile.", group="compile", main=True)
    torch_compile_mode: Mode = _option(
        "default", "What the compiler spends time and memory on.", group="compile", main=True
    )
    torch_compile_regions: Switch = _option(
        "off", "auto: compile each kind of repeated block once instead of the whole model.", group="compile"
    )
    torch_compile_loss: bool = _option(False, "Compile the loss as well, as a graph of its own.", group="compile")
    torch_compile_options: TorchCompileOptions = _option(
        TorchCompileOptions(), "Further arguments of torch.compile.", group="compile"
    )
    # Averaging
    ema: bool = _option(
        False,
        "Keep an exponential moving average of the weights; it is what is validated.",
        group="averaging",
        main=True,
    )
    ema_params: EmaParams = _option(EmaParams(), "How the weights are averaged.", group="averaging")
    # Processes
    sync_bn: bool = _option(
        False,
        "BatchNorm statistics over all processes. One process has nothing to synchronise.",
        group="processes",
        main=True,
    )
    # Optimisation
    max_epochs: PositiveCount = _option(
        10, "Passes over the training set.", group="optimisation", unit="epochs", main=True
    )
    optimizer: Any = _option(
        "SGD", f"{', '.join(OPTIMIZERS)}; or a class or an instance.", group="optimisation", main=True
    )
    optimizer_params: Arguments = _option({}, "Arguments of the optimizer, over its defaults.", group="optimisation")
    zero_weight_decay_on_bias_and_bn: bool = _option(
        False, "No weight decay on biases and normalisation layers.", group="optimisation"
    )
    loss: Named = _option("CrossEntropyLoss", "A loss by name, {name: {arguments}}, or a module.", group="optimisation")
    criterion_params: Arguments = _option({}, "Arguments of a loss given by name.", group="optimisation")
    batch_accumulate: PositiveCount = _option(
        1, "Batches whose mean gradient makes one update.", group="optimisation", unit="batches"
    )
    clip_grad_norm: Positive | None = _option(None, "Largest L2 norm of the gradient.", group="optimisation")
    on_out_of_memory: Literal["raise", "halve"] = _option(
        "raise",
        "halve: split each batch further and accumulate, so that the update stays the same.",
        group="optimisation",
    )
    pre_prediction_callback: Callable[..., Any] | None = _option(
        None, "f(inputs, targets, batch_idx) -> (inputs, targets), before each training step.", group="optimisation"
    )
    # Schedule
    initial_lr: Positive | dict[str, NonNegative] | None = _option(
        0.01,
        "Peak learning rate; {parameter name prefix: rate} with a default (0 freezes); None for an optimizer instance.",
        group="schedule",
        main=True,
    )
    finetune: bool = _option(
        False, "Take {prefix: rate} from the model's own get_finetune_lr_dict(initial_lr).", group="schedule"
    )
    lr_mode: Annotated[Schedule | Arguments, BeforeValidator(_modern_name)] = _option(
        "CosineLRScheduler",
        "How the learning rate falls after the warm-up; or {torch scheduler: {arguments, phase, metric_name}}.",
        group="schedule",
        main=True,
    )
    lr_schedule_function: Callable[..., float] | None = _option(
        None, "For FunctionLRScheduler: f(initial_lr, epoch, iter, max_epoch, iters_per_epoch).", group="schedule"
    )
    lr_updates: Annotated[tuple[Count, ...], BeforeValidator(_as_tuple)] = _option(
        (), "StepLRScheduler: epochs (from 0) after which the rate is multiplied.", group="schedule", unit="epochs"
    )
    step_lr_update_freq: Positive | None = _option(
        None, "StepLRScheduler: epochs between two updates, instead of lr_updates.", group="schedule", unit="epochs"
    )
    lr_decay_factor: Fraction | None = _option(
        None, "Factor of StepLRScheduler and ExponentialLRScheduler.", group="schedule"
    )
    cosine_final_lr_ratio: Fraction = _option(0.01, "Last rate of CosineLRScheduler over the first.", group="schedule")
    lr_warmup_epochs: Count = _option(0, "Epochs of linear warm-up.", group="schedule", unit="epochs", main=True)
    lr_warmup_steps: Count = _option(0, "Updates of linear warm-up, of any number.", group="schedule", unit="updates")
    warmup_mode: Annotated[Literal["LinearEpochLRWarmup", "LinearBatchLRWarmup"], BeforeValidator(_modern_name)] = (
        _option("LinearEpochLRWarmup", "Whether the rate rises once an epoch or at every update.", group="schedule")
    )
    warmup_initial_lr: NonNegative | dict[str, NonNegative] | None = _option(
        None,
        "Rate at the start of the warm-up, or {prefix: rate} as in initial_lr; None: initial_lr / (length + 1).",
        group="schedule",
    )
    lr_cooldown_epochs: Count = _option(0, "Last epochs, at the schedule's last rate.", group="schedule", unit="epochs")
    # Metrics and validation
    train_metrics_list: Metrics | None = _option(
        None, "Metrics of the training loop. None: those of the validation.", group="metrics"
    )
    valid_metrics_list: Metrics | None = _option(
        None, "Metrics of the validation. None: Accuracy for CrossEntropyLoss, else none.", group="metrics"
    )
    metric_to_watch: str | None = _option(
        None, "What ckpt_best.pth is the best of: a metric's name or loss. None: the first metric.", group="metrics"
    )
    greater_metric_to_watch_is_better: bool | None = _option(
        None, "Direction of metric_to_watch. None: False for loss, else True.", group="metrics"
    )
    loss_logging_items_names: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = _option(
        None, "Names of the parts of a loss. None: as the loss calls them (component_names).", group="metrics"
    )
    early_stopping_patience: PositiveCount | None = _option(
        None, "End after this many validations without a better metric_to_watch.", group="metrics", unit="validations"
    )
    early_stopping_min_delta: NonNegative = _option(0.0, "What counts as better by less does not.", group="metrics")
    run_validation_freq: PositiveCount = _option(1, "Epochs between two validations.", group="metrics", unit="epochs")
    # The run
    seed: Count = _option(42, "Seed of torch, numpy and random.", group="run")
    deterministic: bool = _option(False, "Only algorithms that give the same result each time.", group="run")
    max_train_batches: PositiveCount | None = _option(
        None, "Stop each training epoch early.", group="run", unit="batches"
    )
    max_valid_batches: PositiveCount | None = _option(None, "Stop each validation early.", group="run", unit="batches")
    silent_mode: bool = _option(False, "Show no progress.", group="run")
    # Checkpoints
    save_model: bool = _option(True, "Write checkpoints.", group="checkpoints")
    ckpt_best_name: FileName = _option("ckpt_best.pth", "File of the best weights.", group="checkpoints")
    save_ckpt_epoch_list: Annotated[tuple[PositiveCount, ...], BeforeValidator(_as_tuple)] = _option(
        (), "Epochs (from 1) after which ckpt_epoch_<n>.pth is kept; they are validated.", group="checkpoints"
    )
    average_best_models: bool = _option(
        False, "Average the ten best validated weights at the end: average_model.pth.", group="checkpoints"
    )
    resume: bool = _option(False, "Go on with the newest run of this experiment, or with run_id.", group="checkpoints")
    run_id: FileName | None = _option(None, "The run directory to resume.", group="checkpoints")
    ckpt_name: FileName = _option("ckpt_latest.pth", "The file that resume looks for.", group="checkpoints")
    load_opt_params: bool = _option(True, "Resume the optimizer's state too.", group="checkpoints")
    resume_path: str | None = _option(
        None, "A checkpoint file to go on from, in a new run directory.", group="checkpoints"
    )

    @classmethod
    def _prefix(cls) -> str:
        return "training_hyperparams"

    @classmethod
    def from_dict(cls, values: Mapping[str, Any] | TrainingHyperparams | None) -> TrainingHyperparams:
        """Return the record of a mapping with SuperGradients' keys.

        Raises:
            HyperparamsError: on unknown keys, wrong types, bounds or contradictions; it lists all of them.
        """
        if isinstance(values, TrainingHyperparams):
            return values
        if not isinstance(values, Mapping | None):
            raise HyperparamsError([Problem(where=cls._prefix(), message=f"expected a mapping, got {values!r}")])
        keys = [key for key in values or {} if not isinstance(key, str)]
        if keys:
            problems = [Problem(where=cls._prefix(), message=f"expected texts as keys, got {key!r}") for key in keys]
            raise HyperparamsError(problems)
        return cls(**_with_nested_records(values or {}))

    @classmethod
    def from_yaml(cls, source: str | Path) -> TrainingHyperparams:
        """Read a YAML text, or a file when given a `Path`: flat, or under `training_hyperparams:`.

        Raises:
            HyperparamsError: when the text is no YAML, naming the line; else as `from_dict`.
        """
        text = source.read_text(encoding="utf-8") if isinstance(source, Path) else source
        try:
            values = yaml.safe_load(text)
        except yaml.YAMLError as error:
            where = str(source) if isinstance(source, Path) else cls._prefix()
            raise HyperparamsError([Problem(where=where, message=f"expected YAML; {_place(error)}")]) from None
        if isinstance(values, Mapping) and set(values) in ({"training_hyperparams"}, {"training_params"}):
            values = next(iter(values.values()))
        return cls.from_dict(values)

    def to_yaml(self) -> str:
        """Return the changed values as YAML that `from_yaml` reads back to an equal record.

        Raises:
            HyperparamsError: when a value is a Python object, which YAML cannot hold.
        """
        values = self.changed()
        problems = [
            Problem(where=where, message=f"{value!r} is a Python object, which YAML cannot hold; use a name instead")
            for where, value in objects_in(values, self._prefix())
        ]
        if problems:
            raise HyperparamsError(problems)
        return yaml.safe_dump(values, sort_keys=False) if values else "{}\n"

    @property
    def compile_mode(self) -> str:
        """The mode of torch.compile, whichever of its two names it was given by."""
        return self.torch_compile_options.mode or self.torch_compile_mode

    def _contradictions(self) -> list[Problem]:
        return [
            Problem(where=f"training_hyperparams.{name}", message=message)
            for name, wrong, message in _rules(self)
            if wrong
        ]


def _place(error: yaml.YAMLError) -> str:
    """Return what is wrong with a YAML text, and in which line."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"


def _with_nested_records(values: Mapping[str, Any]) -> dict[str, Any]:
    """Build the nested records of a mapping, so that their problems carry their full names."""
    built = dict(values)
    problems: list[Problem] = []
    for name, record in (("ema_params", EmaParams), ("torch_compile_options", TorchCompileOptions)):
        if isinstance(built.get(name), Mapping):
            try:
                built[name] = record(**built[name])
            except HyperparamsError as error:
                problems += error.problems
                del built[name]
    if problems:
        try:
            TrainingHyperparams(**built)
        except HyperparamsError as error:
            problems += error.problems
        raise HyperparamsError(problems)
    return built


def _rules(hp: TrainingHyperparams) -> list[tuple[str, bool, str]]:
    """Return (field, whether it contradicts another, what to do) for every rule between two fields."""
    options = hp.torch_compile_options
    steps = hp.lr_mode in ("StepLRScheduler", "ExponentialLRScheduler")
    optimizer_by_name = isinstance(hp.optimizer, str)
    an_instance = not optimizer_by_name and not isinstance(hp.optimizer, type)
    named_loss = hp.loss if isinstance(hp.loss, str) else None
    scheduler = hp.lr_mode if isinstance(hp.lr_mode, dict) else {}
    ramp = hp.lr_warmup_epochs + hp.lr_cooldown_epochs
    return [
        (
            "torch_compile_options.mode",
            options.mode is not None
            and "torch_compile_mode" in hp.model_fields_set
            and options.mode != hp.torch_compile_mode,
            f"is {options.mode!r} but torch_compile_mode is {hp.torch_compile_mode!r}; give one of them",
        ),
        (
            "torch_compile_options.options",
            options.options is not None and hp.compile_mode != "default",
            "cannot be given together with a mode; torch.compile takes one of them",
        ),
        (
            "torch_compile_regions",
            hp.torch_compile_regions == "auto" and not hp.torch_compile,
            "auto compiles parts of the model, but torch_compile is False",
        ),
        (
            "optimizer",
            optimizer_by_name and hp.optimizer not in OPTIMIZERS,
            f"expected one of {', '.join(OPTIMIZERS)}, got {hp.optimizer!r}{nearest(str(hp.optimizer), OPTIMIZERS)}",
        ),
        (
            "optimizer",
            hp.optimizer is None or isinstance(hp.optimizer, int | float | Mapping | list),
            f"expected a name, a class or an instance, got {hp.optimizer!r}",
        ),
        ("initial_lr", hp.initial_lr is None and not an_instance, "expected a number, got None"),
        (
            "initial_lr",
            hp.initial_lr is not None and an_instance,
            "must be None when optimizer is an instance: it has its own rates",
        ),
        (
            "initial_lr",
            isinstance(hp.initial_lr, dict) and "default" not in hp.initial_lr,
            f"a mapping needs the key default, got {hp.initial_lr!r}",
        ),
        (
            "loss",
            not isinstance(hp.loss, str | Mapping) and not callable(hp.loss),
            f"expected a name, {{name: {{arguments}}}} or a module, got {hp.loss!r}",
        ),
        ("loss", isinstance(hp.loss, Mapping) and len(hp.loss) != 1, f"expected one loss, got {hp.loss!r}"),
        ("criterion_params", bool(hp.criterion_params) and named_loss is None, "goes with a loss given by name only"),
        (
            "lr_mode",
            isinstance(hp.lr_mode, dict)
            and (len(scheduler) != 1 or not isinstance(next(iter(scheduler.values())), dict | None)),
            f"expected {{torch scheduler: {{arguments}}}}, got {hp.lr_mode!r}",
        ),
        (
            "lr_mode",
            isinstance(hp.lr_mode, dict) and hp.lr_cooldown_epochs > 0,
            "a torch scheduler has no cool-down; leave lr_cooldown_epochs out",
        ),
        (
            "finetune",
            hp.finetune and not isinstance(hp.initial_lr, float),
            "asks the model for its rates, so initial_lr must be a number",
        ),
        (
            "warmup_initial_lr",
            isinstance(hp.warmup_initial_lr, dict) and "default" not in hp.warmup_initial_lr,
            f"a mapping needs the key default, got {hp.warmup_initial_lr!r}",
        ),
        ("lr_decay_factor", steps and hp.lr_decay_factor is None, f"is required by {hp.lr_mode}"),
        (
            "lr_updates",
            hp.lr_mode == "StepLRScheduler" and bool(hp.lr_updates) == (hp.step_lr_update_freq is not None),
            "StepLRScheduler needs one of lr_updates and step_lr_update_freq",
        ),
        (
            "lr_schedule_function",
            (hp.lr_mode == "FunctionLRScheduler") != (hp.lr_schedule_function is not None),
            "belongs to lr_mode FunctionLRScheduler, which needs it",
        ),
        (
            "lr_warmup_epochs",
            ramp > 0 and ramp >= hp.max_epochs,
            f"expected warm-up and cool-down to be shorter than max_epochs ({hp.max_epochs}), got {ramp}",
        ),
        (
            "lr_warmup_steps",
            (hp.lr_warmup_steps > 0) != (hp.warmup_mode == "LinearBatchLRWarmup"),
            "goes with warmup_mode LinearBatchLRWarmup, and that mode needs it",
        ),
        (
            "lr_warmup_epochs",
            hp.lr_warmup_epochs > 0 and hp.lr_warmup_steps > 0,
            "give lr_warmup_epochs or lr_warmup_steps, not both",
        ),
        (
            "save_ckpt_epoch_list",
            any(epoch > hp.max_epochs for epoch in hp.save_ckpt_epoch_list),
            f"expected epochs up to max_epochs ({hp.max_epochs}), got {list(hp.save_ckpt_epoch_list)}",
        ),
        (
            "average_best_models",
            hp.average_best_models and not hp.save_model,
            "writes checkpoints, but save_model is False",
        ),
        ("run_id", hp.run_id is not None and not hp.resume, "names a run to resume, but resume is False"),
        ("resume_path", hp.resume_path is not None and hp.resume, "and resume exclude each other: give one"),
    ]


def objects_in(value: object, where: str) -> list[tuple[str, object]]:
    """Return (dotted name, value) of everything in `value` that plain YAML cannot hold."""
    return [
        (name, leaf) for name, leaf in _leaves(value, where) if not isinstance(leaf, str | int | float | bool | None)
    ]
