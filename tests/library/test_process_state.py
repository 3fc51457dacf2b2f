"""The state of the caller's program, restored where its modules are imported anew."""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from batchwright.errors import SpecError
from batchwright.library.pickling import ModulePickler
from batchwright.library.process_state import restore_state, write_state
from batchwright.library.reached_code import replaced_in_libraries
from batchwright.schemas.recommendation import Advice

OPTIONS = """
import functools, threading
LENGTH = 16
SIZES = {"hidden": 4, "layers": [1, 2]}
LOCK = threading.Lock()
HELD = {"lock": LOCK, "length": 16}
UNUSED = 1
_MISSING = object()

class Config:
    length = 16
    def __init__(self):
        self.width = 4

CONFIG = Config()

def doubled(length=LENGTH):
    return 2 * length

@functools.lru_cache
def cached(length):
    return length + 1

def default(value=_MISSING):
    return "missing" if value is _MISSING else value
"""
MODELS = """
import options
from options import CONFIG, LENGTH

def logged(function):
    def call(*arguments):
        return function(*arguments)
    return call

class Base:
    def size(self):
        return options.LENGTH

class Net(Base):
    depth = 2
    def width(self):
        return CONFIG.width
    @property
    def area(self):
        return self.size() * self.width() * self.depth
    @staticmethod
    def bias():
        return 1
    @classmethod
    def name(cls):
        return "net"

@logged
def build():
    import lazily
    return lazily.RATE

def everything():
    net = Net()
    return [net.area, net.bias(), net.name(), build(), options.doubled(), options.cached(1), options.default(), LENGTH]
"""


class Program:
    """The modules of a user's program in this process."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.modules: dict[str, Any] = {name: importlib.import_module(name) for name in names}

    def __getattr__(self, name: str) -> Any:
        return self.modules[name]

    def anew(self, *objects: object) -> tuple[Program, tuple[Advice, ...]]:
        """The modules as a process of its own has them for the objects, and what could not be compared."""
        written = io.BytesIO()
        warnings = write_state(written, *objects)
        for name in self.names:
            del sys.modules[name]
        written.seek(0)
        restore_state(written)
        return Program(self.names), warnings


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Program]:
    """A program of three modules in a folder that is searched for them."""
    for name, source in {"options": OPTIONS, "models": MODELS, "lazily": "RATE = 3\n"}.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made = Program(["options", "models", "lazily"])
    yield made
    for name in made.names:
        sys.modules.pop(name, None)


def set_attribute(program: Program) -> None:
    """As a command line does."""
    program.options.LENGTH = 512


def set_imported_name(program: Program) -> None:
    """A second name of a value, in another module."""
    program.models.LENGTH = 7


def change_object(program: Program) -> None:
    """An object that two modules hold."""
    program.options.CONFIG.width = 40


def set_class_attribute(program: Program) -> None:
    """An attribute of a class."""
    program.models.Net.depth = 9


def replace_method(program: Program) -> None:
    """A method, as libraries of fast kernels do, by a function without a name."""
    program.models.Net.width = lambda _: 77


def wrap_method(program: Program) -> None:
    """A method of a base class, by a function that takes its name."""
    original = program.models.Base.size
    program.models.Base.size = functools.wraps(original)(lambda self: original(self) + 1)


def replace_property(program: Program) -> None:
    """A property."""
    program.models.Net.area = property(lambda _: 5)


def replace_static_method(program: Program) -> None:
    """A method without an instance."""
    program.models.Net.bias = staticmethod(lambda: 13)


def replace_function(program: Program) -> None:
    """A function, by another one of its module."""
    program.options.doubled = program.options.default


def set_defaults(program: Program) -> None:
    """The default of an argument, which was read when the function was made."""
    program.options.doubled.__defaults__ = (100,)


def edit_code(program: Program) -> None:
    """A file that was edited after its import: here the old code is the one in memory."""
    file = Path(program.options.__file__ or "")
    file.write_text(file.read_text().replace("2 * length", "3 * length"))


def replace_decorated(program: Program) -> None:
    """A function inside a decorator."""
    program.models.build.__closure__[0].cell_contents = program.options.default


def set_in_lazy_import(program: Program) -> None:
    """A module that a function imports when it is called."""
    program.lazily.RATE = 30


CHANGES = [
    set_attribute,
    set_imported_name,
    change_object,
    set_class_attribute,
    replace_method,
    wrap_method,
    replace_property,
    replace_static_method,
    replace_function,
    set_defaults,
    edit_code,
    replace_decorated,
    set_in_lazy_import,
]


@pytest.mark.parametrize("change", [pytest.param(change, id=change.__name__) for change in CHANGES])
def test_a_change_of_a_module_is_carried(program: Program, change: Callable[[Program], None]) -> None:
    """What the program computes is what the process of a probe computes."""
    before = program.models.everything()
    change(program)
    expected = program.models.everything()

    there, warnings = program.anew(program.models.everything)

    assert there.models is not program.models
    assert there.models.everything() == expected
    assert (expected == before) == (change is edit_code)
    assert warnings == ()


def test_a_module_without_changes_stays_as_it_was_imported(program: Program) -> None:
    """Objects that are compared by identity keep it."""
    there, _ = program.anew(program.models.everything)

    assert there.options._MISSING is there.options.default.__defaults__[0]
    assert there.models.CONFIG is there.options.CONFIG


def test_modules_that_import_each_other_are_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions are in a module that can only be imported after another one, which they do not name."""
    (tmp_path / "first.py").write_text("WIDTH = 4\nfrom second import width\n")
    (tmp_path / "second.py").write_text("from first import WIDTH\ndef width():\n    return WIDTH\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    program = Program(["first", "second"])

    there, _ = program.anew(program.second.width)

    assert there.second.width() == 4
    for name in program.names:
        del sys.modules[name]


def test_what_no_function_names_is_not_carried(program: Program) -> None:
    """A value that nothing reads may be anything."""
    program.options.UNUSED = object()

    there, _ = program.anew(program.models.everything)

    assert there.options.UNUSED == 1


def test_a_value_that_cannot_be_carried_is_named(program: Program) -> None:
    """With both values and the remedy."""
    program.options.LENGTH = threading.Lock()

    with pytest.raises(SpecError, match=r"options\.LENGTH: is _thread\.lock here and 16 in each probe"):
        program.anew(program.models.everything)


def test_a_large_value_is_not_carried(program: Program) -> None:
    """Twice its size would count against the memory limit on the CPU."""
    program.options.LENGTH = torch.zeros(5 * 2**20)

    with pytest.raises(SpecError, match=r"the value takes 20\.00 MiB. Pass it as an argument"):
        program.anew(program.models.everything)


def test_a_name_of_something_else_is_no_use_of_a_variable(program: Program) -> None:
    """A module has a variable with the name of an attribute of an object, and no code refers to the module."""
    program.models.width = object()
    program.models.depth = threading.Lock()

    program.anew(program.models.everything)


def test_random_weights_are_not_compared(program: Program) -> None:
    """A model of a module that makes it anew has others in each process."""
    file = Path(program.options.__file__)
    file.write_text(file.read_text() + "import torch\nTEACHER = torch.nn.Linear(2000, 2100)\n")
    program.options.TEACHER = torch.nn.Linear(2000, 2100)

    there, _ = program.anew(lambda: sys.modules["options"].TEACHER, program.options)

    assert not torch.equal(there.options.TEACHER.weight, program.options.TEACHER.weight)


def test_a_lock_is_that_of_the_new_process(program: Program) -> None:
    """What belongs to a process is made by each, and nothing is said about it."""
    lock = program.options.LOCK

    there, warnings = program.anew(lambda: sys.modules["options"].LOCK, program.options)

    assert there.options.LOCK is not lock
    assert warnings == ()


def test_what_can_neither_be_compared_nor_carried_is_said(program: Program) -> None:
    """A dict with a lock may have changed elsewhere."""
    _, warnings = program.anew(lambda: sys.modules["options"].HELD, program.options)

    assert [warning.code for warning in warnings] == ["state-not-compared"]
    assert "`options.HELD`" in warnings[0].message


def test_the_command_line_is_carried(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that parses it when it is imported finds the arguments of the program."""
    written = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "argv", ["train.py", "--length=512"])
        write_state(written, program.models.everything)
    monkeypatch.setattr(sys, "argv", ["probe"])
    written.seek(0)
    restore_state(written)

    assert sys.argv == ["train.py", "--length=512"]


def forward(self: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """A method of a module of torch that stands for a patch."""
    return functional.linear(values, self.weight, self.bias) + 1


ORIGINAL = nn.Linear.forward


@functools.wraps(ORIGINAL)
def wrapped(self: nn.Linear, values: torch.Tensor) -> torch.Tensor:
    """A patch that takes the name of what it replaces."""
    return ORIGINAL(self, values) + 1


@pytest.mark.parametrize(
    "patch", [forward, wrapped, functools.partialmethod(forward)], ids=["named", "wrapped", "partial"]
)
def test_a_method_of_torch_that_was_replaced_is_carried(patch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the functions refer to it or not: layers of torch call it."""
    layer = nn.Linear(2, 2)
    written = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", patch)
        expected = layer(torch.ones(2))
        write_state(written)
    assert not torch.equal(layer(torch.ones(2)), expected)
    monkeypatch.setattr(nn.Linear, "forward", ORIGINAL)  # restored after the test
    written.seek(0)
    restore_state(written)

    assert torch.equal(layer(torch.ones(2)), expected)


def test_a_function_of_torch_that_was_replaced_is_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function of a module, by one of the user."""
    written = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(functional, "gelu", lambda values: values + 41)
        write_state(written)
    monkeypatch.setattr(functional, "gelu", functional.gelu)  # restored after the test
    written.seek(0)
    restore_state(written)

    assert functional.gelu(torch.ones(1)).item() == 42


MODELING = """
import torch
import kernels
class Norm(torch.nn.Module):
    def forward(self, values):
        return values
class Mlp(torch.nn.Module):
    def forward(self, values):
        return values
@kernels.checked
def rotate(values):
    return values
"""
KERNELS = """
def fast_forward(self, values):
    return values + 1
class FastMlp:
    pass
def checked(function):
    def call(values):
        return function(values)
    return call
"""


def test_what_an_installed_library_replaced_in_another_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries of fast kernels replace methods and classes; a decorated function is no replacement."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "modeling.py").write_text(MODELING)
    (folder / "kernels.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(str(folder))
    modeling: Any = importlib.import_module("modeling")
    kernels: Any = importlib.import_module("kernels")
    try:
        assert [place for place, _ in replaced_in_libraries() if place[0] == "modeling"] == []
        modeling.Norm.forward = kernels.fast_forward
        modeling.Mlp = kernels.FastMlp
        found = {place for place, _ in replaced_in_libraries() if place[0] == "modeling"}
    finally:
        del sys.modules["modeling"], sys.modules["kernels"]

    assert found == {("modeling", "Norm.forward"), ("modeling", "Mlp")}


def test_a_hook_of_all_modules_is_carried() -> None:
    """It may keep activations."""
    written = io.BytesIO()
    hook = nn.modules.module.register_module_forward_hook(lambda _module, _inputs, output: output + 5)
    write_state(written)
    hook.remove()
    before = nn.modules.module._global_forward_hooks
    written.seek(0)
    try:
        restore_state(written)
        assert nn.Identity()(torch.zeros(1)).item() == 5
    finally:
        nn.modules.module._global_forward_hooks = before


@pytest.mark.parametrize("name", ["torch.backends.cudnn", "torch.backends", "torch.backends.mkldnn", "torch.ops.aten"])
def test_a_module_of_another_class_is_pickled_by_its_name(name: str) -> None:
    """Torch replaces some of its modules by objects."""
    module = resolve_name(name)
    written = io.BytesIO()
    ModulePickler(written).dump(module)

    assert pickle.loads(written.getvalue()) is module  # noqa: S301 - written above
