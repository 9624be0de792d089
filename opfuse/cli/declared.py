"""What a distribution declares: metadata, ranges of versions, and what its plugins offer."""

from __future__ import annotations

import contextlib
import importlib.metadata as metadata
import platform
from collections.abc import Iterator
from typing import Any

from ..core.fusion import Fusion, OneOf, OneOrMore, Optional, Subclasses, fusion_name
from ..core.hookspecs import GROUP
from ..core.plugins import manager
from ..core.records import PluginRecord, normalize
from .scaffold import KINDS

SCHEMA = 1
"""The version of the report."""

RANGES = "opfuse", "torch", "triton"
"""The packages whose range the index has."""


def describe(dist: metadata.Distribution) -> dict[str, Any]:
    """What a distribution declares: its metadata, and what its plugins offer."""
    given: Any = dist.metadata
    pairs = [each.partition(", ") for each in given.get_all("Project-URL") or []]
    urls = {name.lower(): url for name, _, url in pairs}
    licences = [each for each in given.get_all("Classifier") or [] if each.startswith("License ::")]
    licence = given.get("License-Expression") or given.get("License") or "; ".join(licences)
    report: dict[str, Any] = {
        "schema": SCHEMA,
        "distribution": given["Name"],
        "version": dist.version,
        "summary": given.get("Summary") or "",
        "licence": licence.strip().partition("\n")[0],
        "homepage": next((urls[n] for n in ("homepage", "source", "repository") if n in urls), ""),
        "contract": GROUP,
        "requires": {
            "python": given.get("Requires-Python") or "",
            **{name: _as_range(_range(dist, name)) for name in RANGES},
        },
        "checked_with": {"python": platform.python_version(), **_versions()},
        "plugins": [],
        "hardware": [],
        "failures": [*_wrong_metadata(dist, licence)],
    }
    records = [r for r in manager.records if normalize(r.distribution) == normalize(given["Name"])]
    mine = [record for record in records if record.group == GROUP and record.module]
    if not mine:
        others = ", ".join(sorted({record.group for record in records})) or "none"
        what = f"it has no entry point in group {GROUP}, whose hooks this opfuse calls"
        report["failures"].append(f"{what}; of others: {others}")
    report["plugins"] = [_plugin(record) for record in mine]
    report["failures"] += _wrong_offers(report, mine)
    return report


def _wrong_offers(report: dict[str, Any], records: list[PluginRecord]) -> Iterator[str]:
    """Which plugin offers nothing, and whether the description is of something else."""
    for record in records:
        if record.error:
            yield f"plugin {record.name} does not load: {record.error}"
        elif not record.hooks:
            yield f"plugin {record.name} implements no hook"
    offered = {fusion["name"] for plugin in report["plugins"] for fusion in plugin["fusions"]}
    offered |= {recipe.__name__ for record in records for recipe in record.recipes.values()}
    for kind in KINDS.values():
        if report["summary"] == kind.description and offered and kind.offers not in offered:
            what = f"the description is that of `opfuse new` for {kind.offers}, which is not there"
            yield f"metadata: {what}: say what the plugin offers (description in pyproject.toml)"


def _versions() -> dict[str, str]:
    versions = {}
    for name in RANGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _range(dist: metadata.Distribution, name: str) -> Any:
    """The versions of a package that a distribution takes; of torch and Triton, also by toolkits.

    Extras count, and so does what is for another platform.
    """
    from packaging.specifiers import SpecifierSet

    found = SpecifierSet()
    for requirement in _requirements(dist, deep=name != "opfuse"):
        if normalize(requirement.name) == name:
            found &= requirement.specifier
    return found


def _as_range(specifiers: Any) -> str:
    """A range with its lower end first."""
    return ",".join(sorted({*map(str, specifiers)}, reverse=True))


def _requirements(dist: metadata.Distribution, deep: bool) -> Iterator[Any]:
    """What a distribution requires, and, if ``deep``, what opfuse and its toolkits do then."""
    from packaging.requirements import Requirement

    seen, ahead = set(), [dist]
    while ahead:
        for requirement in map(Requirement, ahead.pop().requires or ()):
            yield requirement
            name = normalize(requirement.name)
            if deep and name.startswith("opfuse") and name not in seen:
                seen.add(name)
                with contextlib.suppress(metadata.PackageNotFoundError):
                    ahead.append(metadata.distribution(name))


def _wrong_metadata(dist: metadata.Distribution, licence: str) -> Iterator[str]:
    """What is missing in the metadata, and which range has no end or is not kept here."""
    given: Any = dist.metadata
    for field, key in {"Summary": "description", "Requires-Python": "requires-python"}.items():
        if not given.get(field):
            yield f"metadata: there is no {field} ({key} in pyproject.toml)"
    if not licence:
        yield "metadata: there is no licence (license in pyproject.toml)"
    operators = {each.operator for each in _range(dist, "opfuse")}
    if not operators & {"~=", "=="} and not (operators & {">=", ">"} and operators & {"<=", "<"}):
        got = _as_range(_range(dist, "opfuse")) or "none"
        yield f"metadata: expected a range of opfuse with both ends, opfuse>=0.1,<0.2, got {got}"
    if not str(_range(dist, "torch")):
        yield "metadata: no range of torch, not even by what it requires"
    for name, version in _versions().items():
        if not _range(dist, name).contains(version, prereleases=True):
            takes = _as_range(_range(dist, name))
            yield f"metadata: it takes {name} {takes}, and {version} is installed"


def _plugin(record: PluginRecord) -> dict[str, Any]:
    """What a plugin offers, loaded if it is not; a failure is in the record."""
    with contextlib.suppress(Exception):  # raised in strict mode; it is in the record
        manager.active(record.name)
    fusions = [_fusion(passes, fusion) for passes, fusion in record.fusions]
    return {
        "name": record.name,
        "hooks": [hook.removeprefix("opfuse_") for hook in record.hooks],
        "recipes": sorted(record.recipes),
        "fusions": fusions,
    }


def _fusion(passes: str, fusion: Any) -> dict[str, str]:
    """The name of a fusion, its pattern in words, and whether its condition decides alone."""
    pattern, default = "decided by a function", "on"
    if isinstance(fusion, Fusion):
        pattern = " + ".join(map(_element, fusion.pattern))
        default = "under a recipe" if "recipe" in fusion.needs else default
        if "trades_time" in fusion.declares:
            default = 'under prefer="memory", or where it was measured not to be slower'
    return {"name": fusion_name(fusion), "pass": passes, "pattern": pattern, "default": default}


def _element(element: Any) -> str:
    if isinstance(element, Subclasses):
        return f"any {element.cls.__name__}"
    if isinstance(element, OneOf):
        return " or ".join(map(_element, element.elements))
    if isinstance(element, Optional):
        return f"[{_element(element.element)}]"
    if isinstance(element, OneOrMore):
        return f"({_element(element.element)})..."
    return str(element.__name__)
