"""What Jinja's operations make of a value from the conversation: a piece of it, a changed text, or a read."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import nodes

from unbroken.rendering.jinja.reads import Read, ReadKind, Source, Value, union

_MESSAGE_KEYS = {"role": Source.ROLE, "tool_call_id": Source.ID, "tool_calls": Source.CALLS}
_NUMBERS = (Source.LENGTH, Source.CHANGED_LENGTH, Source.COUNT)
_TEXTS = (Source.TEXT, Source.CHANGED, Source.CALLS)
_USUAL_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id"})
_USUAL_ITEMS = frozenset({"function", "name", "arguments", "type", "text", "content", "image", "image_url", "url"})
_NEIGHBOURS = frozenset({"previtem", "nextitem"})
_EDGES = frozenset({0, -1, 1})
_PIECES = frozenset(
    {
        *("strip", "lstrip", "rstrip", "trim", "lower", "upper", "split", "rsplit", "splitlines", "partition"),
        *("rpartition", "removeprefix", "removesuffix", "items", "keys", "values", "get", "encode", "decode"),
        *("string", "safe", "escape", "e", "default", "d", "first", "last", "list", "tojson", "dictsort", "copy"),
        *("attr", "from_json", "fromjson"),
    }
)
"""Methods and filters whose result consists of pieces of the text, in either case."""
_SEPARATORS = frozenset({"split", "rsplit", "partition", "rpartition", "removeprefix", "removesuffix", "replace"})
"""Their first argument is looked for in the text."""
_CHANGES = frozenset(
    {
        *("replace", "join", "format", "title", "capitalize", "indent", "wordwrap", "urlencode", "striptags"),
        *(
            "reverse",
            "truncate",
            "center",
            "ljust",
            "rjust",
            "zfill",
            "translate",
            "expandtabs",
            "casefold",
            "swapcase",
        ),
        *("forceescape", "xmlattr", "pprint"),
    }
)
_CHOICES = frozenset({"selectattr", "rejectattr", "select", "reject"})
_TYPE_TESTS = frozenset(
    {
        *("defined", "undefined", "none", "string", "mapping", "iterable", "sequence", "number", "boolean", "true"),
        *("false", "integer", "float", "callable", "escaped"),
    }
)
_EQUALITIES = frozenset({"equalto", "eq", "==", "ne", "!=", "in", "sameas"})
_ORDERS = frozenset({"gt", "ge", "lt", "le", "greaterthan", "lessthan", ">", ">=", "<", "<="})


def get_item(base: Value, key: Value, node: nodes.Getattr | nodes.Getitem) -> Value:
    """The value of `base.key` or `base[key]`."""
    result = Value(reads=base.reads | key.reads)
    if base.has(Source.LOOP):
        return result | _get_of_loop(base, key)
    for source in base.sources:
        result |= _get_item_of(Value(frozenset({source}), base.reads), key, node)
    if key.sources and not base.sources:
        result |= _look_up(key, node)
    return result if base.sources else result | Value(texts=base.texts, numbers=base.numbers)


def _get_item_of(base: Value, key: Value, node: nodes.Getattr | nodes.Getitem) -> Value:
    is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    if base.has(*_NUMBERS):
        return base
    if base.has(Source.MESSAGES):
        number = _read_numbers(key, node)
        return Value(base.sources if is_slice else frozenset({(Source.MESSAGE, False)}), base.reads | number)
    if base.has(Source.MESSAGE):
        reads = frozenset(Read(ReadKind.KEY, text, base.is_own()) for text in key.texts - _USUAL_KEYS)
        return Value(base.become(_MESSAGE_KEYS.get(next(iter(key.texts), ""), Source.TEXT)).sources, base.reads | reads)
    if base.has(Source.CALLS):
        return base.become(Source.TEXT) | Value(reads=_read_numbers(key, node)) if not is_slice else base
    if base.has(Source.TEXT):
        return _get_piece(base, key, node)
    return base


def _get_of_loop(base: Value, key: Value) -> Value:
    if key.texts & _NEIGHBOURS:
        return Value(frozenset({(Source.MESSAGE, False)}))
    return base.reading(ReadKind.COUNT, 0) if key.texts & {"first", "last"} else Value(base.sources)


def _get_piece(base: Value, key: Value, node: nodes.Getattr | nodes.Getitem) -> Value:
    if key.texts == {"id"}:
        return base.become(Source.ID)
    if key.sources:
        return base | key.reading(ReadKind.OPAQUE, f"an index, line {node.lineno}")
    items = frozenset(Read(ReadKind.ITEM, text, base.is_own()) for text in key.texts - _USUAL_ITEMS)
    base |= Value(reads=items)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice) and node.arg.step is not None:
        return base.become(Source.CHANGED)
    if key.numbers <= _EDGES or not key.numbers or isinstance(getattr(node, "arg", None), nodes.Slice):
        return base
    return base.become(Source.CHANGED) | base.reading(ReadKind.OPAQUE, f"one of many pieces, line {node.lineno}")


def _read_numbers(key: Value, node: nodes.Node) -> frozenset[Read]:
    """The reads of an index into the messages."""
    if not key.has(Source.LENGTH, Source.CHANGED_LENGTH, *_TEXTS, Source.ROLE, Source.ID):
        return key.reads | {Read(ReadKind.COUNT, number) for number in key.numbers}
    return key.reading(ReadKind.OPAQUE, f"an index, line {node.lineno}").reads


def _look_up(key: Value, node: nodes.Node) -> Value:
    """A constant looked up by something of the conversation."""
    if key.has(Source.ROLE, Source.COUNT) and not key.has(Source.TEXT, Source.CHANGED, Source.LENGTH):
        return Value(reads=key.reads | key.reading(ReadKind.EQUAL).reads)
    return key.reading(ReadKind.OPAQUE, f"a look-up, line {node.lineno}")


def call_method(name: str, base: Value, arguments: Sequence[Value], node: nodes.Node) -> Value:
    """The result of a method."""
    given = union(arguments)
    if not base.sources:
        if not given.sources:
            return base | given
        if name in ("get", "startswith", "endswith", "count", "index", "find"):
            return Value(reads=base.reads) | _look_up(given, node)
        return Value(given.become(Source.CHANGED).sources, base.reads | given.reads)
    if base.has(Source.MESSAGE, Source.TEXT) and name == "get":
        key = Value(texts=frozenset(sorted(arguments[0].texts)[:1])) if arguments else given
        return get_item(base, key, _as_item(node)) | union(arguments[1:])
    if base.has(Source.MESSAGE, Source.LOOP) and name not in ("items", "keys", "values"):
        return base.reading(ReadKind.OPAQUE, f"{name}(), line {node.lineno}")
    if name in ("startswith", "endswith", "__contains__", "__eq__"):
        return compare(base, "in", given, node)
    if name.startswith("is") and base.has(Source.TEXT, Source.CHANGED, Source.ID, Source.ROLE):
        return base.reading(ReadKind.PREDICATE, name)
    return _transform(name, base, arguments, node)


def run_filter(name: str, base: Value, arguments: Sequence[Value], node: nodes.Node) -> Value:
    """The result of a filter."""
    given = union(arguments)
    if not base.sources:
        return Value(given.become(Source.CHANGED).sources, given.reads) | base if given.sources else base | given
    if name in ("length", "count"):
        return _measure(base)
    if name in _CHOICES:
        return _choose(base, arguments, node)
    if name == "map":
        attributes = Value(texts=given.texts)
        source = base.become(Source.MESSAGE) if base.has(Source.MESSAGES) else base
        return get_item(source, attributes, _as_item(node)) if given.texts else base
    if base.has(Source.MESSAGES):
        if name in ("first", "last"):
            return base.become(Source.MESSAGE)
        if name in ("list", "reverse", "default", "d"):
            return base | given
        if name == "tojson":
            return base.become(Source.CHANGED)
        return base | base.reading(ReadKind.OPAQUE, f"the filter {name}, line {node.lineno}")
    return _transform(name, base, arguments, node)


def _measure(base: Value) -> Value:
    if base.has(Source.MESSAGES, Source.MESSAGE, Source.CALLS) and not base.has(Source.TEXT, Source.CHANGED):
        return base.become(Source.COUNT)
    return base.become(Source.CHANGED_LENGTH if base.has(Source.CHANGED) else Source.LENGTH)


def _choose(base: Value, arguments: Sequence[Value], node: nodes.Node) -> Value:
    """Messages, or items of one, that a test holds for."""
    if base.has(Source.MESSAGES) and arguments:
        key = Value(texts=frozenset(sorted(arguments[0].texts)[:1]))
        items = get_item(base.become(Source.MESSAGE), key, _as_item(node))
    else:
        items = base
    test = next(iter(arguments[1].texts), "") if len(arguments) > 1 else ""
    read = run_test(test, items, list(arguments[2:]), node) if test else items.reading(ReadKind.EMPTY)
    return Value(base.sources, base.reads | read.reads)


def _transform(name: str, base: Value, arguments: Sequence[Value], node: nodes.Node) -> Value:
    """The result of a method or filter on text, or on another thing inside a message."""
    given = union(arguments)
    if name in _SEPARATORS and base.has(Source.TEXT):
        base |= Value(reads=frozenset(Read(ReadKind.TEXT, text, base.is_own()) for text in given.texts))
    is_number = base.has(*_NUMBERS) and not base.has(*_TEXTS)
    if name in _PIECES and not is_number:
        return Value(base.sources | given.sources, base.reads | given.reads)
    if name in ("string", "int", "abs", "default", "d") and is_number:
        return base if name != "string" else base.become(Source.CHANGED) | _number_read(base)
    if name in _CHANGES:
        both = base | given
        return Value(both.become(Source.CHANGED).sources, both.reads)
    return (base | given).become(Source.CHANGED) | base.reading(ReadKind.OPAQUE, f"{name}, line {node.lineno}")


def _number_read(base: Value) -> Value:
    return base.reading(ReadKind.COUNT if base.has(Source.COUNT) else ReadKind.LENGTH, 0)


def run_test(name: str, base: Value, arguments: Sequence[Value], node: nodes.Node) -> Value:
    """The result of a test: no source any more."""
    given = union(arguments)
    if not base.sources and not given.sources:
        return Value(reads=base.reads | given.reads)
    if name in _TYPE_TESTS:
        return base.reading(ReadKind.EMPTY)
    if name in _EQUALITIES or name in _ORDERS:
        return compare(base, "gt" if name in _ORDERS else "eq", given, node)
    if name in ("odd", "even", "divisibleby") and base.has(Source.COUNT):
        return base.reading(ReadKind.COUNT, max(given.numbers, default=2))
    if name in ("upper", "lower") and base.has(Source.TEXT, Source.CHANGED):
        return base.reading(ReadKind.PREDICATE, f"is{name}")
    return (base | given).reading(ReadKind.OPAQUE, f"the test {name}, line {node.lineno}")


def compare(left: Value, operator: str, right: Value, node: nodes.Node) -> Value:
    """The result of a comparison: no source any more."""
    both = left | right
    reads = Value(reads=both.reads)
    if not both.sources:
        return reads
    if both.has(*_NUMBERS) and (both.texts or both.has(*_TEXTS)) and not both.numbers:
        if any(character.isdigit() for text in both.texts for character in text):
            return reads | both.reading(ReadKind.OPAQUE, f"the digits of a number, line {node.lineno}")
        left, right = (Value(_drop_numbers(side), side.reads, side.texts) for side in (left, right))
        return reads | compare(left, operator, right, node)
    if both.has(*_NUMBERS):
        return reads | _compare_numbers(left, right, node)
    if both.has(Source.MESSAGE, Source.MESSAGES):
        return reads | _compare_messages(left, right, node)
    if (
        both.has(Source.ID)
        and left.sources
        and right.sources
        and not both.has(Source.TEXT, Source.CHANGED, Source.ROLE)
    ):
        return reads | both.reading(ReadKind.ID)
    if both.has(Source.ROLE) and not both.has(*_TEXTS):
        return reads | union([both.reading(ReadKind.ROLE, text) for text in both.texts or {None}])
    if operator not in ("eq", "ne", "in", "notin"):
        return reads | both.reading(ReadKind.OPAQUE, f"an order of texts, line {node.lineno}")
    if left.sources and right.sources:
        result = both.reading(ReadKind.EQUAL)
        return reads | result | (both.reading(ReadKind.OPAQUE, _changed(node)) if both.has(Source.CHANGED) else reads)
    if both.has(Source.CHANGED) and both.texts - {""}:
        reads |= both.reading(ReadKind.OPAQUE, _changed(node))
    return reads | union([both.reading(ReadKind.TEXT, text) for text in both.texts]) | both.reading(ReadKind.EMPTY)


def _drop_numbers(value: Value) -> frozenset[tuple[Source, bool]]:
    return frozenset(source for source in value.sources if source[0] not in _NUMBERS)


def _changed(node: nodes.Node) -> str:
    return f"a comparison with a changed text, line {node.lineno}"


def _compare_numbers(left: Value, right: Value, node: nodes.Node) -> Value:
    """A comparison of a number with a constant, both perhaps with constants added, or of two positions."""
    both = left | right
    if both.has(*_TEXTS, Source.MESSAGE, Source.MESSAGES):
        return both.reading(ReadKind.OPAQUE, f"a comparison of numbers, line {node.lineno}")
    constants = {a + sign * b for a in right.numbers or {0} for b in left.numbers or {0} for sign in (1, -1)}
    constants |= {-constant for constant in constants} | both.numbers
    if left.sources and right.sources:
        if both.has(Source.LENGTH, Source.CHANGED_LENGTH):
            return both.reading(ReadKind.OPAQUE, f"a comparison of lengths, line {node.lineno}")
    elif not (right.numbers if left.sources else left.numbers):
        return both.reading(ReadKind.OPAQUE, f"a comparison with an unknown number, line {node.lineno}")
    if both.has(Source.CHANGED_LENGTH):
        is_emptiness = constants <= {0, 1, -1}
        kind = ReadKind.EMPTY if is_emptiness else ReadKind.OPAQUE
        return both.reading(kind, None if is_emptiness else f"the length of a changed text, line {node.lineno}")
    kind = ReadKind.LENGTH if both.has(Source.LENGTH) else ReadKind.COUNT
    return union([both.reading(kind, number) for number in constants])


def _compare_messages(left: Value, right: Value, node: nodes.Node) -> Value:
    both = left | right
    if left.sources and right.sources:
        if left.has(*_TEXTS) or right.has(*_TEXTS):
            return both.reading(ReadKind.OPAQUE, f"a comparison with messages, line {node.lineno}")
        return both.reading(ReadKind.EQUAL)
    usual = {text for text in both.texts if text in _USUAL_KEYS}
    keys = [both.reading(ReadKind.KEY, text) for text in both.texts - usual]
    return union([*keys, both.reading(ReadKind.EMPTY)])


def _as_item(node: nodes.Node) -> nodes.Getitem:
    return nodes.Getitem(nodes.Const(None), nodes.Const(None), "load", lineno=node.lineno)
