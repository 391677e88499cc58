"""Twenty nested JSON schemas with a question each, for answers that must be valid. Everything in them is bounded, so
that every answer ends.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def fields(**properties: Schema) -> Schema:
    """Return the schema of an object with all of these properties and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def some(items: Schema, least: int, most: int) -> Schema:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def text(most: int) -> Schema:
    return {"type": "string", "maxLength": most}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


YES_NO: Schema = {"type": "boolean"}
DATE: Schema = {"type": "string", "pattern": r"^20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9])$"}
ADDRESS = fields(street=text(30), city=text(20), zip={"type": "string", "pattern": "^[0-9]{5}$"})
TREE: Schema = {
    "$defs": {
        "node": fields(label=text(12), children=some({"$ref": "#/$defs/leaf"}, 0, 3)),
        "leaf": fields(label=text(12)),
    },
    "$ref": "#/$defs/node",
}

SCHEMAS: dict[str, tuple[str, Schema]] = {
    "person": ("Describe a person.", fields(name=text(25), age=whole(0, 120), address=ADDRESS)),
    "recipe": (
        "Give a recipe for pancakes.",
        fields(
            title=text(30),
            ingredients=some(fields(name=text(20), grams=whole(1, 2000)), 2, 4),
            steps=some(text(60), 2, 3),
        ),
    ),
    "order": (
        "Write an order of two books.",
        fields(
            order_id=whole(1, 99999),
            customer=fields(name=text(25), address=ADDRESS),
            lines=some(fields(item=text(30), quantity=whole(1, 20), price={"type": "number"}), 1, 2),
            state=one_of("open", "paid", "sent"),
        ),
    ),
    "weather": (
        "Report the weather of three days.",
        fields(
            city=text(20),
            days=some(
                fields(date=DATE, low=whole(-40, 50), high=whole(-40, 50), sky=one_of("sun", "cloud", "rain")), 3, 3
            ),
        ),
    ),
    "movie": (
        "Describe a famous movie.",
        fields(
            title=text(30),
            year=whole(1900, 2030),
            cast=some(fields(actor=text(25), role=text(25)), 2, 3),
            rating=fields(stars=whole(1, 5), votes=whole(0, 1000000)),
        ),
    ),
    "ticket": (
        "The printer does not print. Open a support ticket.",
        fields(
            summary=text(60),
            severity=one_of("low", "medium", "high"),
            reporter=fields(name=text(25), email={"type": "string", "pattern": "^[a-z]{1,12}@[a-z]{1,12}\\.com$"}),
            tags=some(text(12), 1, 3),
        ),
    ),
    "quiz": (
        "Write a quiz about animals.",
        fields(
            topic=text(20),
            questions=some(fields(question=text(60), options=some(text(20), 3, 3), answer=whole(0, 2)), 2, 2),
        ),
    ),
    "company": (
        "Describe a company.",
        fields(
            name=text(25),
            founded=whole(1800, 2030),
            offices=some(fields(country=text(20), address=ADDRESS, staff=whole(1, 9999)), 1, 2),
        ),
    ),
    "tree": ("Draw a tree of animals.", TREE),
    "event": (
        "Plan a birthday party.",
        fields(
            title=text(30),
            when=fields(date=DATE, hour=whole(0, 23), minute=whole(0, 59)),
            guests=some(fields(name=text(20), confirmed=YES_NO), 2, 3),
        ),
    ),
    "sensor": (
        "Give the readings of a sensor.",
        fields(
            device=fields(id=whole(1, 9999), model=text(15)),
            readings=some(fields(at=DATE, celsius={"type": "number"}, ok=YES_NO), 3, 4),
        ),
    ),
    "matrix": ("Give a matrix of three rows.", fields(name=text(15), rows=some(some(whole(-99, 99), 3, 3), 3, 3))),
    "review": (
        "Review a restaurant.",
        fields(
            place=fields(name=text(25), kind=one_of("cafe", "bistro", "diner")),
            marks=fields(food=whole(1, 5), service=whole(1, 5), price=whole(1, 5)),
            text=text(100),
            again=YES_NO,
        ),
    ),
    "invoice": (
        "Write an invoice for garden work.",
        fields(
            number=whole(1, 99999),
            issued=DATE,
            payee=fields(name=text(25), address=ADDRESS),
            positions=some(fields(work=text(40), hours=whole(1, 40), rate=whole(10, 200)), 1, 2),
            paid=YES_NO,
        ),
    ),
    "route": (
        "Plan a walk through Paris.",
        fields(start=text(25), legs=some(fields(to=text(25), minutes=whole(1, 90), by=one_of("foot", "bus")), 2, 4)),
    ),
    "settings": (
        "Give the settings of a text editor.",
        fields(
            theme=fields(name=text(15), dark=YES_NO, colors=fields(text=text(8), back=text(8))),
            font=fields(family=text(20), size=whole(6, 40)),
            keys=some(fields(action=text(15), chord=text(10)), 2, 3),
        ),
    ),
    "choice": (
        "Name a shape with its measures.",
        fields(
            shapes=some(
                {
                    "anyOf": [
                        fields(kind={"const": "circle"}, radius=whole(1, 99)),
                        fields(kind={"const": "box"}, width=whole(1, 99), height=whole(1, 99)),
                    ]
                },
                2,
                3,
            )
        ),
    ),
    "team": (
        "Describe a football team.",
        fields(
            name=text(25),
            coach=fields(name=text(25), since=whole(1950, 2030)),
            players=some(fields(name=text(25), number=whole(1, 99), goals=whole(0, 99)), 3, 3),
        ),
    ),
    "diagnosis": (
        "A patient has a cough and fever. Summarise.",
        fields(
            patient=fields(age=whole(0, 120), sex=one_of("f", "m", "x")),
            symptoms=some(fields(name=text(20), days=whole(0, 60)), 1, 3),
            likely=some(fields(illness=text(25), prob={"type": "number", "minimum": 0, "maximum": 1}), 1, 2),
            urgent=YES_NO,
        ),
    ),
    "course": (
        "Plan a course about computers.",
        fields(
            title=text(30),
            units=some(fields(name=text(30), lessons=some(fields(topic=text(30), minutes=whole(5, 120)), 1, 2)), 2, 2),
        ),
    ),
}
