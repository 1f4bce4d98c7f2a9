"""policy.json: kind, parameters, selector and draft cap, with where they came from; validated on load."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from aspire.errors import InputError, UsageError, check_choice, check_keys
from aspire.fileio import read_json, write_json_atomic
from aspire.scheduler.policies.adaptive import Aspire, Fsm
from aspire.scheduler.policies.base import Policy, params_from
from aspire.scheduler.policies.goodput import Goodput
from aspire.scheduler.policies.simple import Autoregressive, Fixed, Staggered
from aspire.scheduler.selector_spec import SelectorSpec

POLICIES: dict[str, type[Policy]] = {
    policy.kind: policy for policy in (Autoregressive, Fixed, Staggered, Fsm, Aspire, Goodput)
}

SCHEMA_VERSION = 1
MAX_DRAFT = 16  # the longest draft of a round: a verification has at most 17 query tokens


@dataclass(frozen=True)
class PolicySpec:
    """A policy as data. ``num_speculative_tokens`` caps the draft length (d_max); ``provenance`` is free-form."""

    kind: str = "autoregressive"
    params: Mapping[str, Any] = field(default_factory=dict)
    selector: SelectorSpec = field(default_factory=SelectorSpec)
    num_speculative_tokens: int = 16
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_choice("policy", self.kind, POLICIES)
        if not 0 <= self.num_speculative_tokens <= MAX_DRAFT:
            raise UsageError(f"num_speculative_tokens {self.num_speculative_tokens} is not in 0..{MAX_DRAFT}")
        params_from(POLICIES[self.kind].Params, f"policy '{self.kind}'", self.params)

    def build(self, max_slots: int) -> Policy:
        """The policy with state for ``max_slots`` slots."""
        cls = POLICIES[self.kind]
        params = params_from(cls.Params, f"policy '{self.kind}'", self.params)
        return cls(params, max_slots, self.num_speculative_tokens)

    @property
    def label(self) -> str:
        """Short name for tables, e.g. ``fixed(g=5)+window``."""
        if self.kind == "autoregressive":
            return self.kind
        settings = ",".join(f"{key}={value}" for key, value in self.params.items())
        return f"{self.kind}({settings})+{self.selector.kind}" if settings else f"{self.kind}+{self.selector.kind}"

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of policy.json."""
        return {
            "version": SCHEMA_VERSION,
            "kind": self.kind,
            "params": dict(self.params),
            "selector": self.selector.to_dict(),
            "num_speculative_tokens": self.num_speculative_tokens,
            "provenance": dict(self.provenance),
        }

    @classmethod
    def from_dict(cls, data: Any, source: str = "policy") -> PolicySpec:
        """Read the object of `to_dict`; raises `InputError` or `UsageError` that names ``source``."""
        if not isinstance(data, dict):
            raise InputError(
                f"{source} holds {type(data).__name__}, not an object with 'kind'; write it with 'aspire tune'"
            )
        check_keys(source, data, ["version", *(name for name in cls.__dataclass_fields__)])
        version = data.get("version", SCHEMA_VERSION)
        if version != SCHEMA_VERSION:
            raise InputError(f"{source} has version {version}; this program reads version {SCHEMA_VERSION}, tune again")
        if "kind" not in data:
            raise InputError(f"{source} has no 'kind'; allowed: {', '.join(sorted(POLICIES))}")
        values = {key: value for key, value in data.items() if key != "version"}
        if "selector" in values:
            values["selector"] = SelectorSpec.from_dict(values["selector"])
        return cls(**values)

    @classmethod
    def parse(cls, text: str) -> PolicySpec:
        """From a policy.json path, or from ``kind[:key=value,...][+selector]`` such as ``fixed:g=5+window``."""
        if text.endswith(".json") or Path(text).is_file():
            return cls.from_dict(read_json(text, "policy file"), f"policy file {text}")
        head, _, selector = text.partition("+")
        kind, _, settings = head.partition(":")
        check_choice("policy", kind, POLICIES)
        params: dict[str, Any] = {}
        for item in filter(None, settings.split(",")):
            key, equals, value = item.partition("=")
            try:
                number = float(value)
            except ValueError:
                raise UsageError(f"policy '{text}': '{item}' is not key=number, e.g. fixed:g=5+window") from None
            if not equals:
                raise UsageError(f"policy '{text}': '{item}' is not key=number, e.g. fixed:g=5+window")
            params[key] = int(number) if number.is_integer() and "." not in value else number
        return cls(kind=kind, params=params, selector=SelectorSpec(kind=selector) if selector else SelectorSpec())

    def save(self, path: str | Path) -> Path:
        """Write policy.json in one piece."""
        return write_json_atomic(path, self.to_dict())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PolicySpec) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.kind, tuple(sorted(self.params.items())), tuple(asdict(self.selector).items())))
