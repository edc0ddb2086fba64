"""A copy of the caller's module or callable, in one dtype, that is run and trained while the original stays."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from lowtide.errors import ArgumentError, describe
from lowtide.verify.trees import Inputs, cast

Role = Literal["reference", "candidate"]
KeyMap = Mapping[str, str] | Callable[[str], str]
State = dict[str, Tensor]
_T = TypeVar("_T")


class Subject:
    """One of the two things that are compared.

    `target` is a module, a bound method of a module, or any other callable (which then has no parameters).
    Names of parameters, buffers and modules are the reference's; `key_map` leads from them to the candidate's own.
    """

    def __init__(
        self, target: object, role: Role, reference: Subject | None = None, key_map: KeyMap | None = None
    ) -> None:
        self.role: Role = role
        self._reference = reference
        self._target = _copied(target, role)
        owner = self._target if isinstance(self._target, nn.Module) else getattr(self._target, "__self__", None)
        self.module: nn.Module = owner if isinstance(owner, nn.Module) else nn.Module()
        self._key_map = key_map
        self._own_modules = dict(self.module.named_modules(remove_duplicate=False))
        self._refuse_parameters_without_data()
        for parameter in self.module.parameters():
            parameter.grad = None
        self._training = {module: module.training for module in self.module.modules()}

    def _refuse_parameters_without_data(self) -> None:
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            if nn.parameter.is_lazy(tensor):
                fix = "run the module once first"
                raise ArgumentError(
                    describe(expected="weights with a shape", got=f"a lazy {name}", where=self.role, fix=fix)
                )
            if tensor.is_meta:
                raise ArgumentError(describe(expected="weights with values", got=f"{name} on meta", where=self.role))

    def __call__(self, inputs: Inputs) -> object:
        assert callable(self._target)
        return self._target(*inputs.args, **inputs.kwargs)

    def to(self, dtype: torch.dtype, device: torch.device) -> Subject:
        """Cast floating-point parameters and buffers to `dtype`, complex ones to its complex form; in place."""
        self.module.to(device)
        if any(t.is_complex() for t in [*self.module.parameters(), *self.module.buffers()]):
            self.module._apply(lambda t: cast(t, dtype))  # Module.to would drop the imaginary part
        else:
            self.module.to(dtype)
        return self

    def set_training(self, train: bool) -> None:
        """Eval mode, or train mode; submodules that the caller keeps in eval mode inside a training module stay so."""
        self.module.train(train)
        if train and self._training[self.module]:
            for module, flag in self._training.items():
                module.training = flag

    def renamed(self, name: str) -> str:
        """This subject's own name for the reference's `name`."""
        if self._key_map is None:
            return name
        if not isinstance(self._key_map, Mapping):
            return self._key_map(name)
        parts = name.split(".")
        for n in range(len(parts), 0, -1):
            prefix = ".".join(parts[:n])
            if prefix in self._key_map:
                return ".".join([self._key_map[prefix], *parts[n:]])
        return name

    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the reference's names; tied ones under each of their names."""
        return self._members("_parameters")

    def buffers(self) -> State:
        """Buffers by the reference's names, those that are not saved included."""
        return self._members("_buffers")

    def _members(self, where: Literal["_parameters", "_buffers"]) -> dict:
        # as named_parameters(remove_duplicate=False), which walks the tree anew and takes a hundred times longer
        own = {
            f"{prefix}.{leaf}" if prefix else leaf: value
            for prefix, module in self._own_modules.items()
            for leaf, value in getattr(module, where).items()
            if value is not None
        }
        return self._by_reference_name(own, self._reference._members(where) if self._reference is not None else own)

    def submodules(self) -> dict[str, nn.Module]:
        """Modules by the reference's names; "" is the module itself."""
        return self._by_reference_name(self._own_modules, (self._reference or self)._own_modules)

    def _by_reference_name(self, own: dict[str, _T], reference: Iterable[str]) -> dict[str, _T]:
        if self._reference is None:
            return own
        return {name: own[own_name] for name in reference if (own_name := self.renamed(name)) in own}

    def name_of(self, module: nn.Module) -> str | None:
        """The reference's name of `module`, None for a stranger."""
        return next((name for name, m in self.submodules().items() if m is module), None)

    def state(self) -> State:
        """A copy of every parameter and buffer."""
        tensors = {**self.parameters(), **self.buffers()}
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def load(self, state: State) -> None:
        """Copy `state` (the reference's names) into this subject, rounding to its dtypes."""
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                if name in state:
                    parameter.copy_(state[name])
            for name, buffer in self.buffers().items():
                if name not in state:
                    continue
                if buffer.shape == state[name].shape:
                    buffer.copy_(state[name])
                else:
                    owner, _, leaf = self.renamed(name).rpartition(".")
                    value = state[name].to(buffer.device, buffer.dtype, copy=True)
                    setattr(self.module.get_submodule(owner), leaf, value)

    def clear_grads(self) -> None:
        """Forget all gradients (a new one is then a new tensor: recorded ones stay valid)."""
        for parameter in self.module.parameters():
            parameter.grad = None


def _copied(target: object, role: Role) -> object:
    if not callable(target):
        raise ArgumentError(
            describe(expected="a module or a callable", got=type(target).__name__, where=f"verify({role})")
        )
    if inspect.isfunction(target) or inspect.isbuiltin(target):
        return target
    try:
        return copy.deepcopy(target)
    except Exception as error:
        raise ArgumentError(
            describe(
                expected=f"a {role} that copy.deepcopy can copy (verify trains copies, never the caller's module)",
                got=f"{type(error).__name__}: {error}",
                where=f"verify({role})",
                fix="detach tensors kept as plain attributes, or register them as buffers",
            )
        ) from error


def give_same_weights(reference: Subject, candidate: Subject) -> None:
    """Load the reference's state dict into the candidate, strictly.

    Raises:
        ArgumentError: keys or shapes differ; the message names the first of them.
    """
    saved = reference.module.state_dict()
    state = {candidate.renamed(key): value for key, value in saved.items()}
    fix = "pass key_map={reference name or prefix: candidate's} where only the names differ"
    try:
        candidate.module.load_state_dict(state, strict=True)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        got = " ".join(line if len(line) < 300 else line[:300] + " ..." for line in lines)
        raise ArgumentError(
            describe(expected="a candidate with the reference's state dict", got=got, where="verify", fix=fix)
        ) from error
    names, found = reference.parameters(), candidate.parameters()
    missing = [name for name in names if name not in found]
    own_names = dict(candidate.module.named_parameters(remove_duplicate=False))
    extra = own_names.keys() - {candidate.renamed(name) for name in names}
    if missing or extra:
        got = f"no {missing[0]} in the candidate" if missing else f"{min(extra)} in the candidate alone"
        raise ArgumentError(describe(expected="parameters of the same names", got=got, where="verify", fix=fix))
    candidate.load({name: buffer for name, buffer in reference.buffers().items() if name not in saved})


def freeze(subject: Subject, names: Iterable[str]) -> None:
    """Switch the gradient off for every parameter whose (reference's) name is, or lies under, one of `names`.

    Raises:
        ArgumentError: a name that no parameter has.
    """
    known = subject.parameters()
    for name in names:
        members = [key for key in known if key == name or key.startswith(f"{name}.")]
        if not members:
            got = f"{name!r}, not among {', '.join(list(known)[:5])}, ..."
            raise ArgumentError(describe(expected="names of parameters or modules", got=got, where="verify(frozen)"))
        for member in members:
            known[member].requires_grad_(False)
