"""Formats of texts in JSON schemas, as patterns where llama.cpp has no grammar for them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

__all__ = ["CHECKED", "KNOWN", "PATTERNS", "PLAIN", "SHORT"]

KNOWN: Final = ("date", "time", "date-time", "uuid", *(f"uuid{n}" for n in range(1, 6)))
"""Those of llama.cpp. A tuple, as a client may ask for anything, which no set can look up."""

_LABEL: Final = "[A-Za-z0-9]([A-Za-z0-9-]{0,60}[A-Za-z0-9])?"
_OCTET: Final = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP: Final = "[0-9a-fA-F]{1,4}"
_ATOM: Final = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_LETTER: Final = "([A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_PARTS: Final = f"({_LETTER}|[/?])*"
_DATE: Final = "([0-9]+D|[0-9]+M([0-9]+D)?|[0-9]+Y([0-9]+M([0-9]+D)?)?)"
_TIME: Final = "T([0-9]+S|[0-9]+M([0-9]+S)?|[0-9]+H([0-9]+M([0-9]+S)?)?)"

PATTERNS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "email": rf"^{_ATOM}(\.{_ATOM})*@({_LABEL}\.)+[A-Za-z]{{2,20}}$",
        "hostname": rf"^{_LABEL}(\.{_LABEL}){{0,3}}$",
        "ipv4": rf"^({_OCTET}\.){{3}}{_OCTET}$",
        "ipv6": "^("
        + "|".join(
            [f"({_GROUP}:){{7}}{_GROUP}", f"({_GROUP}:){{1,7}}:"]
            + [f"({_GROUP}:){{1,{7 - n}}}(:{_GROUP}){{1,{n}}}" for n in range(1, 7)]
            + [f":(:{_GROUP}){{1,7}}", "::"]
        )
        + ")$",
        "uri": rf"^[A-Za-z][A-Za-z0-9+.-]*:(//([A-Za-z0-9._-]+(:[0-9]{{1,4}})?)?(/{_LETTER}*)*"
        rf"|{_LETTER}+(/{_LETTER}*)*)(\?{_PARTS})?(#{_PARTS})?$",
        "duration": f"^P({_DATE}({_TIME})?|{_TIME}|[0-9]+W)$",
        "json-pointer": "^(/([^~/]|~[01])*)*$",
    }
)
"""What they demand, or less than they allow: RFC 5321, 1123, 4291, 3986, 3339 and 6901."""


def _email(n_atom: int, n_label: int) -> str:
    atom, label = _ATOM.removesuffix("+"), f"[A-Za-z0-9]([A-Za-z0-9-]{{0,{n_label}}}[A-Za-z0-9])?"
    return rf"^{atom}{{1,{n_atom}}}(\.{atom}{{1,{n_atom}}})?@({label}\.){{1,2}}[A-Za-z]{{2,10}}$"


def _uri(n_host: int, n_path: int, n_rest: int) -> str:
    path = "[A-Za-z0-9._~!$&'()*+,;=:@-]"
    end = f"({_LETTER}|[/?]){{0,{n_rest}}}"
    rest = f"{path[:-2]}/-]{{0,{n_path}}}"
    return (
        rf"^[A-Za-z][A-Za-z0-9+.-]{{0,9}}:(//([A-Za-z0-9._-]{{1,{n_host}}}(:[0-9]{{1,4}})?)?"
        rf"(/{rest})?|{path}{rest})(\?{end})?(#{end})?$"
    )


SHORT: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "email": (_email(40, 20), _email(20, 14), _email(12, 5)),
        "uri": (_uri(100, 400, 60), _uri(50, 90, 13), _uri(30, 40, 2)),
    }
)
"""Some of them with no longer texts than these have, the longest first; of a URI's path without
what is escaped.
"""

_DAY: Final = "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_HOUR: Final = (
    r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]{3})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
)
_UUID: Final = "^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$"

PLAIN: Final[Mapping[str, str]] = MappingProxyType(
    {
        **{name: _UUID for name in KNOWN if name.startswith("uuid")},
        "date": f"^{_DAY}$",
        "time": f"^{_HOUR}$",
        "date-time": f"^{_DAY}T{_HOUR}$",
    }
)
"""llama.cpp's own, as patterns, for texts that do not stand in JSON."""

CHECKED: Final = (
    "idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template",
    "relative-json-pointer", "regex",
)  # fmt: skip
"""Further ones of JSON Schema. What it does not know says nothing about which texts are right."""
