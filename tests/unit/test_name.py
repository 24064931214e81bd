"""A naming is one to one, and says so early."""

from __future__ import annotations

import pickle

import pytest

from millrace.errors import ConfigError
from millrace.name import Naming, QualifiedName, parse_renames


def test_without_renames_every_name_stays_as_it_is() -> None:
    naming = parse_renames([])
    assert naming.is_identity
    assert naming.target("shop", "item") == ("shop", "item")
    assert naming.source("shop", "item") == ("shop", "item")
    assert naming.as_json() == ""
    assert Naming.from_json("") == naming
    assert parse_renames(["a=a"]).is_identity


def test_a_schema_that_is_renamed_takes_its_relations_along_and_back() -> None:
    naming = parse_renames(["public=shop", '"Odd ""x"" ="=b'])
    assert naming.target("public", "item") == QualifiedName("shop", "item")
    assert naming.target('Odd "x" =', "t").label == "b.t"
    assert naming.target("other", "t") == ("other", "t")
    assert naming.source("shop", "item") == ("public", "item")
    assert naming.source("public", "item") is None  # the target's own, no name of the source
    assert naming.source("other", "t") == ("other", "t")


def test_with_a_prefix_schemas_that_come_later_never_meet_those_of_others() -> None:
    naming = Naming({"public": "shop_public", "kept": "kept"}, prefix="shop_")
    assert naming.target("later", "t") == ("shop_later", "t")
    assert naming.target("kept", "t") == ("kept", "t")
    assert naming.source("shop_public", "t") == ("public", "t")
    assert naming.source("shop_later", "t") == ("later", "t")
    assert naming.source("later", "t") is None  # somebody else's
    assert naming.source("shop_kept", "t") is None
    assert not naming.is_identity
    assert Naming.from_json(naming.as_json()) == naming


def test_two_schemas_can_trade_their_names() -> None:
    naming = parse_renames(["a=b", "b=a"])
    assert naming.target("a", "t") == ("b", "t")
    assert naming.source("a", "t") == ("b", "t")


def test_a_table_of_its_own_goes_before_its_schema() -> None:
    naming = Naming({"a": "b"}, {QualifiedName("a", "t"): QualifiedName("c", "u")})
    assert naming.target("a", "t") == ("c", "u")
    assert naming.target("a", "s") == ("b", "s")
    assert naming.source("c", "u") == ("a", "t")


def test_a_naming_survives_text_and_pickle() -> None:
    naming = Naming({"b": "ü", "a": "c"}, {QualifiedName("x", "y"): QualifiedName("x", "z")})
    assert Naming.from_json(naming.as_json()) == naming
    assert pickle.loads(pickle.dumps(naming)) == naming
    assert parse_renames(["a=c", "b=d"]).as_json() == parse_renames(["b=d", "a=c"]).as_json()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["shop"], "is not old=new"),
        (["a=b=c"], "is not old=new"),
        (["=b"], "is not old=new"),
        (["a=b", "a=c"], "two names, b and c"),
        (["a=c", "b=c"], "a and b would both be called c"),
        (["a=" + "x" * 64], "64 bytes"),
        (["a=" + "ü" * 32], "64 bytes"),
        (["a=pg_shop"], "reserved"),
    ],
)
def test_what_can_not_be_a_naming_is_refused_with_a_hint(texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        parse_renames(texts)
    assert error.value.hint
