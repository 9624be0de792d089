"""The quantizers of one op, per recipe, and their state in a checkpoint as plain tensors."""

from __future__ import annotations

import hashlib
import itertools
import types
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..settings import current, is_captured
from .coded_tensor import QuantizedParameter, quantized_parameters
from .names import first_match
from .quantizer import Quantizer, QuantizerRole, Recipe

_KEY = "quantizers."
MODES = ("forward", "backward")
_DEFAULT_NAMES = {"forward": ("input", "weight"), "backward": ("grad_output",)}


def quantizer_names(op: Any, mode: str) -> tuple[str, ...]:
    """The names of an op's quantizers, from its roles; equal names are numbered."""
    types = [role.tensor_type for role in roles(op, mode)]
    known = _DEFAULT_NAMES[mode]
    types = [name or (known[i] if i < len(known) else f"{mode}{i}") for i, name in enumerate(types)]
    totals, numbers = Counter(types), {name: itertools.count() for name in types}
    return tuple([n if totals[n] == 1 else f"{n}{next(numbers[n])}" for n in types])


def roles(op: Any, mode: str) -> list[QuantizerRole]:
    """The role of each tensor that an op quantizes in a mode."""
    count = op.num_quantizers(mode)
    roles: list[QuantizerRole] = op.get_quantizer_roles(mode) or [QuantizerRole()] * count
    if len(roles) != count:
        raise RuntimeError(
            f"{type(op).__name__} names {len(roles)} {mode} roles for {count} quantizers"
        )
    return roles


def living_weights(op: Any) -> dict[str, QuantizedParameter]:
    """The quantized parameters of an op, by the names of the quantizers of its weights.

    If quantizers are not named like parameters, as in an op with several weights, the weights are
    the first parameters, in the same order.
    """
    if not (held := quantized_parameters(op)):
        return {}
    weights = [name for name in quantizer_names(op, "forward") if name.startswith("weight")]
    pairs = zip(weights, op.param_names, strict=False)
    found = {name: held.get(name, held.get(param)) for name, param in pairs}
    return {name: param for name, param in found.items() if param is not None}


def entries_of(module: Any, name: str) -> Any:
    """The entries of a module's state dict under a name, each part of their keys an attribute.

    Whoever looks for the place of a key, as ``torch.distributed.checkpoint`` does, finds one.
    """
    entries: dict[str, Any] = {}
    module._save_to_state_dict(entries, "", False)
    root = types.SimpleNamespace()
    for key, value in entries.items():
        *path, leaf = key.split(".")
        place = root
        for part in path:
            place = vars(place).setdefault(part, types.SimpleNamespace())
        vars(place)[leaf] = value
    return getattr(root, name)


class PreparedOps:
    """The ops of a prepared model, in its order; dropped, never copied, with an op."""

    def __init__(self, ops: Iterable[Any] = ()) -> None:
        self._ops = [weakref.ref(op) for op in ops]

    def __reduce__(self) -> tuple[type[PreparedOps], tuple[()]]:
        return PreparedOps, ()

    def ops(self) -> list[Any]:
        """The ops that still exist."""
        return [op for ref in self._ops if (op := ref()) is not None]


class QuantizerStates:
    """Quantizers of one basic op, by name. Recipes may alternate: each keeps its own.

    Attributes:
        own: Quantizers without state, whatever the recipe.
        latest: The recipe of the last call under one.
        called: The block around that call, and the patterns of ops to skip.
        unrestored: The recipes without state in the last checkpoint, until the user was warned.
        name: The name of the op that the quantizers know; None: there are none yet.
        borrows: Whether quantizers were those of quantized parameters, which may be replaced.
    """

    borrows = False

    def __init__(self) -> None:
        self.own: dict[str, Quantizer] = {}
        self._by_recipe: dict[Recipe, dict[str, Quantizer]] = {}
        self._unrecorded: dict[Recipe, dict[str, Quantizer]] = {}
        self._recipe_names: dict[Recipe, str] = {}
        # recipe JSON -> state of a recipe not used yet
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._last: set[str] | None = None  # the recipes in the last checkpoint, by their JSON
        self.latest: Recipe | None = None
        self.called: tuple[Any, tuple[str, ...]] = None, ()
        self.unrestored: set[Recipe] = set()
        self.name: str | None = None

    def use(self, op: Any, recipe: Recipe | None, env: Any = None) -> dict[str, Quantizer]:
        """Create the quantizers of ``op`` for ``recipe``, unless they exist; return them.

        A quantized parameter brings its own quantizer.

        Args:
            op: The op.
            recipe: The recipe.
            env: The environment; None: that of the plan that is being made.
        """
        if recipe is None:
            return {}
        lives = living_weights(op).items()
        theirs = {name: p.quantized.quantizer for name, p in lives if p.recipe == recipe}
        self.borrows |= bool(theirs)
        if (known := self._by_recipe.get(recipe)) is not None:
            known.update({name: theirs[name] for name in known if name in theirs})
            return known
        made: dict[str, Quantizer] = {}
        with torch.inference_mode(False):  # their state is for training too
            for mode in MODES:
                siblings: list[Quantizer] = []
                before = None
                for name, role in zip(quantizer_names(op, mode), roles(op, mode), strict=True):
                    siblings, before = siblings if role == before else [], role
                    found = theirs.get(name)
                    if found is None:
                        given = env or current.environment, siblings
                        found = op.engine.new_quantizer(recipe, role, *given)
                        siblings.append(found)
                        _refuse_captured(found, f"{type(op).__name__} {op.name!r}")
                    check_state(found)
                    made[name] = found
        self._recipe_names[recipe], self.name = op.engine.recipe_name(recipe), op.name
        self._by_recipe[recipe] = made
        try:
            self._restore(recipe, op)
        except RuntimeError:  # the next call must raise it too
            del self._by_recipe[recipe]
            raise
        return made

    def refresh(self, op: Any) -> QuantizerStates:
        """These, with the current quantizers of the parameters of ``op``; a copy has its own."""
        for recipe in self._by_recipe:
            self.use(op, recipe)
        return self

    def of(self, recipe: Recipe | None, *, recording: bool = True) -> dict[str, Quantizer]:
        """The quantizers for ``recipe`` by name, forward ones first; empty without one.

        Args:
            recipe: The recipe, or None.
            recording: Whether they record; if not, they are :meth:`Quantizer.unrecorded`.
        """
        quantizers = self.own if recipe is None else self._by_recipe.get(recipe) or self.own
        if recording or quantizers is self.own or not quantizers:
            return quantizers
        assert recipe is not None
        if recipe not in self._unrecorded:
            self._unrecorded[recipe] = {name: q.unrecorded() for name, q in quantizers.items()}
        return self._unrecorded[recipe]

    def of_mode(self, op: Any, recipe: Recipe | None, mode: str) -> list[Quantizer]:
        """The quantizers for ``recipe`` that the forward uses, or the backward; empty: none yet."""
        made = [*self._by_recipe.get(recipe, {}).values()]  # type: ignore[arg-type]  # None
        count = op.num_quantizers("forward")  # which are the first
        return made[:count] if mode == "forward" else made[count:]

    def in_force(self, op: Any, recipe: Recipe | None, recording: bool) -> dict[str, Quantizer]:
        """The quantizers of :meth:`of` that the recipe's block does not skip."""
        observer = current.observer
        if recipe is None or first_match(op.name, current.skip):
            return self.own
        if observer is None or recipe not in self._by_recipe:
            return self.of(recipe, recording=recording)
        found = self.of(recipe, recording=recording or observer.records)
        return {name: observer.wrap(quantizer, op, name) for name, quantizer in found.items()}

    def get(self, op: Any, mode: str, index: int) -> Quantizer | None:
        """A quantizer of the pass that runs or is planned; outside of it, of the last recipe."""
        if mode not in MODES:
            raise ValueError(f'mode must be "forward" or "backward", got {mode!r}')
        if (of_pass := current.quantizers) is not None and op in of_pass:
            quantizers = of_pass[op]
        else:
            recipe = current.recipe or (self.latest if of_pass is None else None)
            quantizers = self.in_force(op, recipe, current.is_recording or mode == "backward")
        return quantizers[quantizer_names(op, mode)[index]] if quantizers else None

    def check_name(self, op: Any, name: str) -> None:
        """Refuse to rename an op whose quantizers know it by another name."""
        if self._by_recipe and name != op.name:
            raise RuntimeError(
                f"{type(op).__name__} has quantizers that know it as {op.name!r}, not {name!r}: "
                f"set its name, or call opfuse.assign_names, before the first call under a recipe"
            )

    @property
    def was_loaded(self) -> bool:
        """Whether any checkpoint was loaded."""
        return self._last is not None

    @property
    def has_state(self) -> bool:
        """Whether a quantizer has state that persists over steps, or some waits for one."""
        return bool(self._loaded) or any(
            q.state_names for qs in self._by_recipe.values() for q in qs.values()
        )

    def forget(self) -> None:
        """Let the next call make new quantizers."""
        vars(self).update(vars(QuantizerStates()) | {"own": self.own, "_last": self._last})

    def __getstate__(self) -> dict[str, Any]:
        # a copy has other quantizers, and ran in no block
        return {**vars(self), "_unrecorded": {}, "called": (None, ())}

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Move the state as ``nn.Module._apply`` moves parameters, keeping its dtype.

        What comes from the meta device has no values: the next call makes new quantizers.
        """
        self._unrecorded.clear()
        for recipe in [*self._by_recipe]:
            for _, quantizer, name in self._entries(recipe):
                before = getattr(quantizer, name)
                setattr(quantizer, name, after := _moved(before, fn))
                if before.is_meta and not after.is_meta:
                    self._by_recipe.pop(recipe, None)
                    self._last = self._last or set()

    def _entries(self, recipe: Recipe) -> Iterator[tuple[str, Quantizer, str]]:
        for key, quantizer in self._by_recipe[recipe].items():
            for name in quantizer.state_names:
                yield f"{key}.{name}", quantizer, name

    def _text(self, recipe: Recipe) -> str:
        """The text that identifies a recipe in a checkpoint: its registered name and its fields."""
        return recipe.to_json(self._recipe_names[recipe])

    def save(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        """Write the state of every recipe used so far, and of those loaded but not used yet.

        An entry is the tensor itself, so that one can load in place, unless it shares memory.
        A remark of a quantizer becomes a warning; its text has no numbers, so it is shown once.
        """
        for recipe, quantizers in self._by_recipe.items():
            if any(quantizer.remark() for quantizer in quantizers.values()):
                what = f"quantizers of {type(recipe).__name__} remark on values that they cast"
                text = f"{what}: opfuse.explain tells of which tensors, and what became of them"
                warnings.warn(text, stacklevel=2)
        states: Any = {self._text(recipe): [*self._entries(recipe)] for recipe in self._by_recipe}
        waiting = {text: [(key, None, key) for key in of] for text, of in self._loaded.items()}
        for text, entries in sorted({**waiting, **states}.items()):
            if not entries:
                continue
            # what else was used does not matter
            where = f"{prefix}{_KEY}{hashlib.sha256(text.encode()).hexdigest()[:8]}."
            destination[where + "recipe"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
            for key, quantizer, name in entries:
                if quantizer is None:
                    value = self._loaded[text][key]
                else:
                    value = _own(quantizer, name, where + key, destination)
                destination[where + key] = value if keep_vars else value.detach()

    def load(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Take the quantizer state out of ``state_dict``.

        State of recipes that are not in use yet waits for them.

        Raises:
            RuntimeError: It does not name its recipe, or is not made of tensors; then nothing is
                taken.
        """
        groups: dict[str, dict[str, Tensor]] = {}
        keys = [key for key in state_dict if key.startswith(prefix + _KEY)]
        for key in keys:
            if not isinstance(state_dict[key], Tensor):
                raise RuntimeError(
                    f"quantizer state {key}: expected a tensor, "
                    f"got {type(state_dict[key]).__name__}"
                )
            number, _, name = key[len(prefix + _KEY) :].partition(".")
            groups.setdefault(number, {})[name] = state_dict[key]
        texts = [_recipe_text(f"{prefix}{_KEY}{number}", group) for number, group in groups.items()]
        for key in keys:
            del state_dict[key]
        for text, group in zip(texts, groups.values(), strict=True):
            self._loaded[text] = {name: value.clone() for name, value in group.items()}
        self._last = {*texts}
        for recipe in self._by_recipe:
            self._restore(recipe)

    def _restore(self, recipe: Recipe, op: Any = None) -> None:
        """Give the quantizers for ``recipe`` the state that was loaded for it, if any was.

        They miss it if the last checkpoint had none.
        """
        text = self._text(recipe)
        self.unrestored.discard(recipe)
        if self._last is not None and text not in self._last and any(self._entries(recipe)):
            self.unrestored.add(recipe)
        if (state := self._loaded.get(text)) is None:
            return
        targets = {key: getattr(of, name) for key, of, name in self._entries(recipe)}
        if targets.keys() != state.keys():
            who = f" of {type(op).__name__} {op.name!r}" if op is not None and op.name else ""
            expected = ", ".join(sorted(targets)) or "none"
            what = f"quantizer state{who} for {recipe}: expected {expected}"
            raise RuntimeError(f"{what}; the checkpoint has {', '.join(sorted(state))}")
        for key, target in targets.items():
            if target.shape != state[key].shape:
                raise RuntimeError(
                    f"quantizer state {key}: expected shape {tuple(target.shape)}, "
                    f"the checkpoint has {tuple(state[key].shape)}"
                )
        with torch.no_grad():
            for key, quantizer, name in self._entries(recipe):
                if targets[key].is_meta:
                    setattr(quantizer, name, state[key])
                else:
                    targets[key].copy_(state[key])
        del self._loaded[text]


def _own(quantizer: Quantizer, name: str, key: str, destination: dict[str, Any]) -> Tensor:
    """The state of a quantizer for a state dict, or a copy if its memory is in there already.

    Ops may have one quantizer, which is saved once for each of them.
    """
    value: Tensor = getattr(quantizer, name)
    saved_as = vars(quantizer).setdefault("_saved_as", {})
    other = destination.get(saved_as.get(name, key))
    if other is not None and other.data_ptr() == value.data_ptr():
        return value.clone()
    saved_as[name] = key
    return value if value.untyped_storage().nbytes() == value.nbytes else value.clone()


def check_state(quantizer: Quantizer) -> None:
    """Refuse state that cannot be saved, moved, or read by a quantizer that records nothing."""
    who = type(quantizer).__name__
    for name in quantizer.state_names:
        if not isinstance(vars(quantizer).get(name), Tensor):
            raise TypeError(
                f"{who}.state_names expected the names of tensors that its __init__ sets, "
                f"got {name!r}, which is none"
            )
        if hasattr(type(quantizer), name):
            raise TypeError(f"{who}.{name} is state: set it in __init__ only, not on the class")
    if more := {*quantizer.pending_names} - {*quantizer.state_names}:
        raise TypeError(f"{who}.pending_names expected names of its state, got {sorted(more)}")


def _refuse_captured(quantizer: Quantizer, op: str) -> None:
    """Refuse state that a CUDA graph would set to its first values at each replay."""
    for name in quantizer.state_names:
        state = vars(quantizer).get(name)
        if isinstance(state, Tensor) and is_captured(state.device):
            raise RuntimeError(
                f"the {type(quantizer).__name__} of {op} has state, which expected to be made "
                f"before a CUDA graph is captured, and got its first call while one is: run the "
                f"step once before you capture it"
            )


def _moved(value: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    """Move a state as ``fn`` moves parameters; its values and dtype stay."""
    if value.is_meta:
        return fn(value).to(value.dtype)
    where = fn(torch.empty(0, dtype=value.dtype, device=value.device)).device
    return value if where == value.device else value.to(where)


def _recipe_text(where: str, group: dict[str, Tensor]) -> str:
    """Take the recipe's JSON out of a group of entries of a checkpoint."""
    expected = f"{where}.recipe is expected to hold the recipe's JSON as bytes"
    if "recipe" not in group:
        raise RuntimeError(
            f"quantizer state {where}.{min(group)} belongs to no recipe: {expected}, and is missing"
        )
    try:
        return bytes(group.pop("recipe").tolist()).decode()
    except (TypeError, ValueError) as error:
        raise RuntimeError(f"quantizer state: {expected}, which it does not: {error}") from None
