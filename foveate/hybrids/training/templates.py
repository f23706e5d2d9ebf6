"""Wordings of needles: RULER's (Hsieh et al. 2024), and nineteen others, so that no wording stands for retrieval."""

from __future__ import annotations

from typing import NamedTuple


class Template(NamedTuple):
    """`kind` is number, word or uuid; a row reads introduction, context with needles, question, prefix and value."""

    introduction: str
    needle: str
    question: str
    prefix: str


RULER = Template(
    "A special magic {kind} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n",
    "One of the special magic {kind}s for {key} is: {value}.",
    "\nWhat is the special magic {kind} for {key} mentioned in the provided text?",
    " The special magic {kind} for {key} mentioned in the provided text is",
)

TEMPLATES = (
    RULER,
    Template("", "The secret {kind} of {key} is {value}.", "\nWhat is the secret {kind} of {key}?", " It is"),
    Template("", "Remember that {key} has the {kind} {value}.", "\nThe {kind} that {key} has", " is"),
    Template(
        "Read the text and note every code in it.\n",
        "The code for {key} is {value}.",
        "\nQuestion: What is the code for {key}?",
        "\nAnswer:",
    ),
    Template("", "{key}: {value}.", "\n{key}", ":"),
    Template("", "The {kind} {value} belongs to {key}.", "\nWhich {kind} belongs to {key}?", " The {kind}"),
    Template(
        "The following text contains a hidden fact.\n",
        "The password of {key} was set to {value}.",
        "\nWhat was the password of {key} set to?",
        " The password of {key} was set to",
    ),
    Template("", "In the register, {key} is listed under {value}.", "\nIn the register, {key}", " is listed under"),
    Template("", "Agent {key} carries the {kind} {value}.", "\nAgent {key} carries the {kind}", ""),
    Template(
        "Answer the question below the text.\n",
        "Locker {key} opens with {value}.",
        "\nWith what does locker {key} open?",
        " Locker {key} opens with",
    ),
    Template("", "Entry {key} = {value}.", "\nEntry {key}", " ="),
    Template("", "The serial {kind} of the {key} reads {value}.", "\nQ: serial {kind} of the {key}?", " A:"),
    Template(
        "",
        "Please keep in mind: {key} stands for {value}.",
        "\nWhat does {key} stand for?",
        " {key} stands for",
    ),
    Template("", "Room {key} was booked with the {kind} {value}.", "\nRoom {key} was booked with the {kind}", ""),
    Template(
        "Some facts are scattered over these paragraphs. You will be asked about one.\n",
        "It is a fact that the {kind} of {key} equals {value}.",
        "\nTell me the {kind} of {key}.",
        " The {kind} of {key} equals",
    ),
    Template("", "Parcel {key} has tracking {kind} {value}.", "\nTracking {kind} of parcel {key}", ":"),
    Template("", "The answer to {key} is {value}.", "\nWhat is the answer to {key}?", " The answer to {key} is"),
    Template("", "Someone wrote {value} next to {key}.", "\nWhat did someone write next to {key}?", " Someone wrote"),
    Template("", '"{key}" -> "{value}".', '\n"{key}"', ' -> "'),
    Template(
        "",
        "For {key}, the magic {kind} happens to be {value}.",
        "\nFor {key}, the magic {kind} happens to be",
        "",
    ),
)

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise, a line of it."""
