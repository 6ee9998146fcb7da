"""The dependency graph: orders that hold for any graph, and cycles found, named and forgotten."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.activation._recomputing.graph import DependencyGraph
from holdfast.errors import DependencyCycleError


def graph_of(edges):
    graph = DependencyGraph()
    for layer_id, depends_on in edges.items():
        graph.add_dependency(layer_id, depends_on)
    return graph


def names(indices):
    return [f"layer {index}" for index in indices]


any_edges = st.lists(st.lists(st.integers(0, 7), max_size=4), min_size=8, max_size=8).map(
    lambda rows: {f"layer {at}": names(row) for at, row in enumerate(rows)}
)
acyclic_edges = any_edges.map(
    lambda edges: {layer: [d for d in needed if d < layer] for layer, needed in edges.items()}
)
some_layers = st.lists(st.integers(0, 7), max_size=5).map(names)


def reached(edges, starts):
    found = set()
    todo = list(starts)
    while todo:
        layer = todo.pop()
        if layer not in found:
            found.add(layer)
            todo += edges.get(layer, [])
    return found


def on_a_cycle(edges):
    return {layer for layer, needed in edges.items() if layer in reached(edges, needed)}


def test_what_is_added_is_kept_in_order_and_once():
    graph = DependencyGraph()
    assert graph.dependencies("c") == ()
    graph.add_dependency("c", ["b", "a", "b"])
    assert graph.dependencies("c") == ("b", "a")
    graph.add_dependency("c", (each for each in ["a", "z"]))
    assert graph.dependencies("c") == ("b", "a", "z")


def test_a_layer_that_needs_nothing_is_a_layer():
    graph = graph_of({"a": []})
    assert graph.topological_order(["a"]) == ["a"]
    assert not graph.has_cycle()


def test_dependencies_come_first_also_those_of_dependencies():
    graph = graph_of({"loss": ["head"], "head": ["block 1"], "block 1": ["block 0"]})
    assert graph.topological_order(["loss"]) == ["block 0", "block 1", "head", "loss"]


def test_otherwise_layers_come_as_asked_and_added():
    graph = graph_of({"c": ["z", "y"]})
    assert graph.topological_order(["d", "c", "b", "d"]) == ["d", "z", "y", "c", "b"]
    assert graph.topological_order([]) == []


def test_layers_nobody_asked_for_are_left_out():
    graph = graph_of({"b": ["a"], "d": ["c"]})
    assert graph.topological_order(["b"]) == ["a", "b"]


def test_a_chain_may_be_long():
    graph = DependencyGraph()
    for at in range(20_000):
        graph.add_dependency(f"{at + 1}", [f"{at}"])
    assert graph.topological_order(["20000"]) == [str(at) for at in range(20_001)]
    assert not graph.has_cycle()
    graph.add_dependency("0", ["20000"])
    assert graph.has_cycle()
    with pytest.raises(DependencyCycleError) as caught:
        graph.topological_order(["7"])
    assert len(caught.value.layers) == 20_001
    assert len(str(caught.value)) < 1000


def test_a_cycle_is_named_in_order():
    graph = graph_of({"start": ["a"], "a": ["b"], "b": ["c"], "c": ["a"]})
    assert graph.has_cycle()
    with pytest.raises(DependencyCycleError) as caught:
        graph.topological_order(["start"])
    assert caught.value.layers == ("a", "b", "c")
    assert caught.value.layer_id == "a"
    assert "'a' depends on 'b', which depends on 'c', which depends on 'a'" in str(caught.value)


def test_a_layer_that_needs_itself_is_a_cycle():
    graph = graph_of({"a": ["a"]})
    assert graph.has_cycle()
    with pytest.raises(DependencyCycleError, match="'a' depends on itself") as caught:
        graph.topological_order(["a"])
    assert caught.value.layers == ("a",)


def test_a_cycle_elsewhere_does_not_concern_a_layer():
    graph = graph_of({"x": ["y"], "y": ["x"], "b": ["a"]})
    assert graph.has_cycle()
    assert graph.topological_order(["b"]) == ["a", "b"]


def test_the_cycle_that_would_be_closed_is_told_and_nothing_added():
    graph = graph_of({"b": ["a"], "c": ["b", "a"]})
    assert graph.cycle_with("d", ["c"]) == ()
    assert graph.cycle_with("a", ["x"]) == ()
    assert graph.cycle_with("a", ["c"]) == ("a", "c")
    assert graph.cycle_with("a", ["x", "b"]) == ("a", "b")
    assert graph.cycle_with("new", ["new"]) == ("new",)
    assert not graph.has_cycle()
    assert graph.dependencies("a") == ()


def test_cleared_it_is_as_new():
    graph = graph_of({"a": ["b"], "b": ["a"]})
    graph.clear()
    assert not graph.has_cycle()
    assert graph.dependencies("a") == ()
    assert graph.topological_order(["a"]) == ["a"]
    assert graph.cycle_with("b", ["a"]) == ()


@pytest.mark.parametrize("blank", ["", "  ", "\t\n", None, 3, b"a", ["a"]])
def test_ids_that_name_nothing_are_refused(blank):
    graph = DependencyGraph()
    with pytest.raises(ValueError, match="layer_id must be a text that is not blank"):
        graph.add_dependency(blank, [])
    with pytest.raises(ValueError, match="each of depends_on must be"):
        graph.add_dependency("a", ["b", blank])
    with pytest.raises(ValueError, match="each of layer_ids must be"):
        graph.topological_order([blank])
    assert graph.dependencies("a") == ()


def test_one_text_is_no_list_of_layers():
    graph = DependencyGraph()
    with pytest.raises(ValueError, match=r"not 'abc': give \['abc'\]"):
        graph.add_dependency("d", "abc")
    with pytest.raises(ValueError, match="layer_ids must be a list of layer ids, not None"):
        graph.topological_order(None)


@given(edges=acyclic_edges, asked=some_layers)
def test_any_graph_without_cycles_has_an_order(edges, asked):
    graph = graph_of(edges)
    assert not graph.has_cycle()
    order = graph.topological_order(asked)
    assert len(order) == len(set(order))
    assert set(order) == reached(edges, asked)
    for layer in order:
        for needed in edges[layer]:
            assert order.index(needed) < order.index(layer)
    assert graph.topological_order(asked) == order


@given(edges=any_edges, asked=some_layers)
def test_any_cycle_is_found_by_those_it_concerns_only(edges, asked):
    graph = graph_of(edges)
    cyclic = on_a_cycle(edges)
    assert graph.has_cycle() == bool(cyclic)
    if not reached(edges, asked) & cyclic:
        assert set(graph.topological_order(asked)) == reached(edges, asked)
        return
    with pytest.raises(DependencyCycleError) as caught:
        graph.topological_order(asked)
    require_cycle(edges, caught.value.layers)


@given(edges=any_edges, layer=st.integers(0, 8), added=some_layers)
def test_a_closing_cycle_is_found_in_any_graph(edges, layer, added):
    (layer,) = names([layer])
    after = edges | {layer: [*edges.get(layer, []), *added]}
    cycle = graph_of(edges).cycle_with(layer, added)
    assert bool(cycle) == (layer in on_a_cycle(after))
    if cycle:
        assert cycle[0] == layer
        require_cycle(after, cycle)


def require_cycle(edges, layers):
    assert len(set(layers)) == len(layers) > 0
    for layer, needed in zip(layers, (*layers[1:], layers[0]), strict=True):
        assert needed in edges[layer]


def test_many_threads_add_and_ask():
    graph = DependencyGraph()
    threads, layers = 8, 100
    begin = threading.Barrier(threads)
    orders = []

    def work(thread):
        begin.wait()
        for at in range(1, layers):
            graph.add_dependency(f"{thread}/{at}", [f"{thread}/{at - 1}", f"shared {at}"])
            graph.has_cycle()
        orders.append((thread, graph.topological_order([f"{thread}/{layers - 1}"])))

    running = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert len(orders) == threads
    for thread, order in orders:
        own = [each for each in order if "/" in each]
        assert own == [f"{thread}/{at}" for at in range(layers)]
        assert len(order) == 2 * layers - 1
