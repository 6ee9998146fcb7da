"""What the tests of `checkpoint` watch with: counted calls, noted operations, nodes that stay."""

import functools
import gc
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from holdfast.activation import checkpoint


class Counted:
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


class Watching(TorchDispatchMode):
    """Notes the name of every operation that runs under it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def checked(function, **keywords):
    return lambda *args, **kwargs: checkpoint(function, *args, **keywords, **kwargs)


def slope(function):
    """The gradient as a function, which can itself be differentiated."""

    def wrapper(x):
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
        return gradient

    return wrapper


def grads(function, *inputs):
    return torch.autograd.grad(function(*inputs).sum(), inputs)


def three(x):
    return x.sin().exp().sin()


def nodes_of(tensor):
    """Every node of the graph behind the tensor."""
    todo, seen = [tensor.grad_fn], []
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.append(node)
            todo.extend(next_node for next_node, _ in node.next_functions)
    return seen


class Mark:
    pass


def graph_left_by(function):
    """The nodes that outlive the output they belong to; only a cycle can keep one alive."""

    def scope():
        output = function(torch.randn((), requires_grad=True))
        marks = []
        for node in nodes_of(output):
            node.metadata["mark"] = mark = Mark()
            marks.append((weakref.ref(mark), node.name()))
        return marks

    gc.disable()
    try:
        return [name for mark, name in scope() if mark() is not None]
    finally:
        gc.enable()


def keeping(*ops, **keywords):
    return functools.partial(create_selective_checkpoint_contexts, [*ops], **keywords)


def right_or_refused(run, expected, word, *errors):
    """Whether ``run()`` gives the tensors expected, or one of the errors, with the word in it."""
    try:
        got = run()
    except errors as error:
        return word in str(error)
    return all(map(torch.equal, got, expected))
