"""Trees of values that no version writes, as decoded JSON, and a word of what each is refused with.
Used by tests and by the campaign of hostile files."""

import math


def nested(depth, wrap, value=0):
    for _ in range(depth):
        value = wrap(value)
    return value


def tag(name, payload):
    return {"$": [name, payload]}


HOSTILE = [
    (2**63, "9223372036854775808 must not stand there"),
    (math.inf, "inf must not stand there"),
    (b"raw", "b'raw' must not stand there"),
    ({"$": 1}, "must hold one tag and one payload"),
    ({"$": ["int"]}, "must hold one tag and one payload"),
    ({"$": [1, 2]}, "must hold one tag and one payload"),
    ({"$": ["int", "f"], "x": 1}, "must hold one tag and one payload"),
    (tag("int", 5), "a text is missing"),
    (tag("int", "0x1f"), "an int is not written in hex digits"),
    (tag("int", "1_0"), "an int is not written in hex digits"),
    (tag("int", "f" * 2_000_000), "an int has more than 1,048,576 hex digits"),
    (tag("float", "1.5"), "must be nan, inf or -inf"),
    (tag("float", ["nan"]), "must be nan, inf or -inf"),
    (tag("str", "gA=="), "the bytes of a text are not UTF-8"),
    (tag("bytes", "a"), "the base64 text is damaged"),
    (tag("bytes", "\u00e9\u00e9\u00e9\u00e9"), "the base64 text is damaged"),
    (tag("bytes", None), "base64 text is missing"),
    (tag("tuple", "ab"), "a list is missing"),
    (tag("dict", {}), "a list is missing"),
    (tag("dict", [[1]]), "a list of 2 must not have 1 items"),
    (tag("dict", [[[], 1]]), "a list can be no key and no member"),
    (tag("dict", [[tag("tuple", [[]]), 1]]), "a tuple can be no key and no member"),
    (tag("dict", [[1, 1], [True, 2]]), "the key True occurs twice"),
    (tag("dict", [[tag("tensor", "x"), 1]]), "no tensor can be there"),
    (tag("set", [1, 1]), "the member 1 occurs twice"),
    (tag("set", [tag("set", [])]), "a set can be no key and no member"),
    (tag("set", [tag("numpy.scalar", ["timedelta64", "AAAAAAAAAAA="])]), "can be no key and no"),
    (tag("set", [{}]), "a dict can be no key and no member"),
    (tag("frozenset", [tag("numpy.array", ["int8", [], "AA=="])]), "a numpy.ndarray can be no key"),
    (tag("defaultdict", ["eval", []]), "'eval' is no factory of a defaultdict"),
    (tag("defaultdict", [None]), "a list of 2 must not have 1 items"),
    (tag("deque", [1, [1, 2]]), "a deque has more items than it may have"),
    (tag("deque", [-1, []]), "a whole number from 0 to"),
    (tag("deque", [True, []]), "a whole number from 0 to"),
    (tag("complex", [1, 2]), "a float is missing"),
    (tag("complex", [tag("int", "f"), 0.0]), "a float is missing"),
    (tag("path", ["eval", "x"]), "a path is of no known kind"),
    (tag("path", ["path", 3]), "a text is missing"),
    (tag("datetime", ["2024-13-01T00:00:00", 0, None]), "a datetime is not written as"),
    (tag("datetime", ["2024-01-01", 0, None]), "a datetime is not written as"),
    (tag("datetime", ["2024-01-01T00:00:00+00:00", 0, None]), "a datetime is not written as"),
    (tag("datetime", ["2024-01-01T00:00:00", 2, None]), "a whole number from 0 to 1"),
    (tag("datetime", ["2024-01-01T00:00:00", 0, 86_400_000_000]), "to 86399999999 is missing"),
    (tag("date", "20240101"), "a date is not written as"),
    (tag("time", ["25:00:00", 0, None]), "a time is not written as"),
    (tag("datetime", ["2024-01-01T00:00:00", -1, None]), "a whole number from 0 to 1"),
    (tag("datetime", ["2024-01-01T00:00:00", 0, -86_400_000_000]), "from -86399999999 to"),
    (tag("time", ["01:00:00", 2, None]), "a whole number from 0 to 1"),
    (tag("time", ["01:00:00", 0]), "a list of 3 must not have 2 items"),
    (tag("timedelta", [10**10, 0, 0]), "a whole number from -999999999 to 999999999"),
    (tag("timedelta", [-(10**9), 0, 0]), "a whole number from -999999999 to 999999999"),
    (tag("timedelta", [0, 86_400, 0]), "a whole number from 0 to 86399"),
    (tag("timedelta", [0, -1, 0]), "a whole number from 0 to 86399"),
    (tag("timedelta", [0, 0, 1_000_000]), "a whole number from 0 to 999999"),
    (tag("timedelta", [0, 0, -1]), "a whole number from 0 to 999999"),
    (tag("torch.dtype", "float32.__class__"), "a torch dtype is not written as one"),
    (tag("torch.device", "cuda:01"), "a torch device is not written as one"),
    (tag("torch.Size", [1.5]), "a whole number from"),
    (tag("torch.Size", [0] * 65), "a torch Size is not written as one"),
    (tag("numpy.scalar", ["object", "AAAAAAAAAAA="]), "no dtype of this format"),
    (tag("numpy.scalar", ["U1", "YQAAAA=="]), "a scalar cannot be of dtype U1"),
    (tag("numpy.scalar", ["datetime64[xy]", "AAAAAAAAAAA="]), "no dtype of this format"),
    (tag("numpy.scalar", ["int32", "AAAA"]), "4 characters of base64 cannot hold exactly 4 bytes"),
    (tag("numpy.scalar", ["int16", "AAAA"]), "there are 3 bytes where 2 belong"),
    (tag("numpy.scalar", ["bool", "Ag=="]), "a bool is neither 0 nor 1"),
    (tag("numpy.scalar", ["str", "gA=="]), "the bytes of a text are not UTF-8"),
    (tag("numpy.array", ["int8", [2**40], ""]), "an array inside the tree has more than"),
    (tag("numpy.array", ["int8", [-1], ""]), "a whole number from 0"),
    (tag("numpy.array", ["int8", [0, 2**62, 2**62], ""]), "NumPy has no arrays of such a shape"),
    (tag("numpy.array", ["int8", [1] * 65, "AA=="]), "NumPy has no arrays of such a shape"),
    (tag("numpy.array", ["U1", [1], "/////w=="]), "a text has a character that does not exist"),
    (tag("tensor", ""), "the name of a tensor is empty or too long"),
    (tag("array", 1), "a text is missing"),
    (nested(65, lambda value: [value]), "it is nested more than 64 deep"),
    (nested(900, lambda value: tag("tuple", [value])), "it is nested more than 64 deep"),
]
