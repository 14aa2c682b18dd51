"""What a pitfall is, what was found, and the judge: all pure, without torch."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import yaml
from pydantic import BaseModel

from sgnb.hyperparams import TrainingHyperparams
from sgnb.pitfalls.facts import Facts

Severity = Literal["error", "warning", "information"]
_ORDER: tuple[Severity, ...] = ("error", "warning", "information")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pitfall:
    """A rule: data, and a pure predicate that returns the values which tripped it, or None."""

    code: str  # Theme and number, never used for another rule.
    severity: Severity
    title: str
    field: str  # The hyperparameter that it belongs to, relative to training_hyperparams; "" for none.
    evidence: Callable[[Facts], str | None]
    reason: str
    fix: Mapping[str, Any] | None = None  # Dotted names relative to training_hyperparams.
    advice: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """A pitfall that this run would meet. `evidence` is what was read or measured here."""

    code: str
    severity: Severity
    title: str
    field: str
    reason: str
    evidence: str
    fix: dict[str, Any] | None = None
    advice: str = ""
    source: str = ""

    @property
    def where(self) -> str:
        """Code and hyperparameter."""
        return f"{self.code}, {self.field}" if self.field else self.code

    def __str__(self) -> str:
        lines = [f"{self.severity} {self.where}: {self.title}", f"  {self.reason}"]
        lines += [f"  Seen here: {self.evidence}."]
        lines += [f"  {self.advice}"] if self.advice else []
        lines += [f"  Fix: {fix_text(self.fix)}"] if self.fix else []
        lines += [f"  Source: {self.source}"] if self.source else []
        return "\n".join(lines)


class Findings(Sequence[Finding]):
    """Findings, the worst first. Shows itself as text, as HTML in a notebook, and as JSON."""

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._findings = tuple(findings)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Findings: ...
    def __getitem__(self, index: int | slice) -> Finding | Findings:
        return Findings(self._findings[index]) if isinstance(index, slice) else self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Findings) and self._findings == other._findings

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def errors(self) -> Findings:
        """Those that make the run fail, or make it useless."""
        return Findings(finding for finding in self if finding.severity == "error")

    @property
    def warnings(self) -> Findings:
        """Those that make the run slower or worse."""
        return Findings(finding for finding in self if finding.severity == "warning")

    def summary(self) -> str:
        """Return how many there are of each severity, as one sentence."""
        counts = [(sum(finding.severity == severity for finding in self), severity) for severity in _ORDER]
        words = [_counted(count, severity) for count, severity in counts if count]
        return f"{', '.join(words)}." if words else "No pitfalls found."

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *map(str, self)])

    def __repr__(self) -> str:
        return f"<Findings: {self.summary()}>"

    def _repr_html_(self) -> str:
        return f'<div role="status"><p>{html.escape(self.summary())}</p>{"".join(map(_as_html, self))}</div>'

    def to_json(self) -> str:
        """Return a JSON list with one object a finding; a Python object in a fix as its repr."""
        return json.dumps([dataclasses.asdict(finding) for finding in self], indent=2, default=repr)


def judge(facts: Facts, rules: Iterable[Pitfall]) -> tuple[Finding, ...]:
    """Return what `rules` find in `facts`, the worst first."""
    findings = []
    for rule in rules:
        evidence = rule.evidence(facts)
        if evidence is not None:
            findings.append(_finding(rule, evidence))
    return tuple(sorted(findings, key=lambda finding: _ORDER.index(finding.severity)))


def apply_fix(training_hyperparams: TrainingHyperparams, fix: Mapping[str, Any]) -> TrainingHyperparams:
    """Return the hyperparameters with the dotted names of `fix` set, validated as a whole.

    Raises:
        HyperparamsError: when the result is not acceptable.
    """
    changes: dict[str, Any] = {}
    for dotted, value in fix.items():
        name, _, inner = dotted.partition(".")
        if not inner:
            changes[name] = value
            continue
        record = changes.get(name, getattr(training_hyperparams, name, None))
        # A nested record is replaced as a whole; an unknown name is left to the validation, which names it.
        changes[name] = record.replace(**{inner: value}) if isinstance(record, BaseModel) else {inner: value}  # type: ignore[attr-defined]
    return training_hyperparams.replace(**changes)


def fix_text(fix: Mapping[str, Any]) -> str:
    """Return a fix as overrides on the command line."""
    return " ".join(f"training_hyperparams.{name}={_as_yaml(value)}" for name, value in fix.items())


def _as_yaml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    return yaml.safe_dump(value, default_flow_style=True).strip().removesuffix("\n...").strip()


def _finding(rule: Pitfall, evidence: str) -> Finding:
    return Finding(
        code=rule.code,
        severity=rule.severity,
        title=rule.title,
        field=rule.field,
        reason=rule.reason,
        evidence=evidence,
        fix=None if rule.fix is None else dict(rule.fix),
        advice=rule.advice,
        source=rule.source,
    )


def _counted(count: int, severity: Severity) -> str:
    if severity == "information":
        return f"{count} information"
    return f"{count} {severity}{'s' if count > 1 else ''}"


def _as_html(finding: Finding) -> str:
    head = html.escape(f"{finding.severity.capitalize()} {finding.where}: {finding.title}")
    body = html.escape(" ".join(text for text in (finding.reason, finding.advice) if text))
    parts = [f"Seen here: {html.escape(finding.evidence)}"]
    if finding.fix:
        parts.append(f"Fix: <code>{html.escape(fix_text(finding.fix))}</code>")
    if finding.source:
        source = html.escape(finding.source)
        is_link = finding.source.startswith("https://")
        link = f'<a href="{source}" target="_blank" rel="noopener noreferrer">{source}</a>' if is_link else source
        parts.append(f"Source: {link}")
    return f"<p><b>{head}</b><br>{body}<br><small>{'<br>'.join(parts)}</small></p>"
