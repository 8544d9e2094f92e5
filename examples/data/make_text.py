"""Writes harbour.txt: days in a harbour town, told by a small grammar with a memory.

`python examples/data/make_text.py` gives the file that lies beside it, byte for byte. The grammar has what a small model can learn in
stages: letters and words; agreement of verbs and pronouns with who is spoken of; cargoes that go with trades; and, within a paragraph,
that the same ship, person and weather come back.
"""

import random
from pathlib import Path

PARAGRAPHS, SEED = 400, 20

PEOPLE = [
    ("Marta", "she", "her"),
    ("Oskar", "he", "his"),
    ("Inge", "she", "her"),
    ("Tobias", "he", "his"),
    ("Leonie", "she", "her"),
    ("Brandt", "he", "his"),
    ("Sigrid", "she", "her"),
    ("Anselm", "he", "his"),
    ("old Karin", "she", "her"),
    ("young Peer", "he", "his"),
]
TRADES = {
    "pilot": ["the charts", "the tide table", "the brass compass"],
    "carpenter": ["planks of larch", "a box of nails", "the new rudder"],
    "baker": ["warm bread", "sacks of flour", "a tray of rolls"],
    "sailmaker": ["bolts of canvas", "waxed thread", "the mended sail"],
    "fishmonger": ["baskets of herring", "a barrel of cod", "crates of ice"],
    "lamplighter": ["oil for the lamps", "a coil of wick", "the long ladder"],
}
SHIPS = ["Heron", "Morning Star", "Patience", "Two Brothers", "Grey Goose", "Constance", "Swift"]
PLACES = [
    "the quay",
    "the fish market",
    "the lighthouse",
    "the chapel steps",
    "the rope walk",
    "the customs house",
    "the inn",
]
WEATHER = {
    "fog": ("a thick fog lay on the water", "the fog lifted", "the bell on the pier was rung every minute"),
    "storm": ("a storm came up from the west", "the wind dropped", "the boats were tied with double lines"),
    "frost": ("ice had formed between the piles", "the sun came out", "the steps were strewn with sand"),
    "calm": ("the sea was as flat as a plate", "a light breeze rose", "the sails hung still"),
    "rain": ("rain fell without a pause", "the clouds broke", "the cargo was covered with tarpaulin"),
}
MONTHS = ["January", "March", "April", "June", "August", "September", "October", "November", "December"]
NUMBERS = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ORDINALS = ["first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "twentieth"]


def paragraph(draw: random.Random) -> str:
    (name, pronoun, possessive), (friend, *_) = draw.sample(PEOPLE, 2)
    trade = draw.choice(sorted(TRADES))
    cargo = draw.choice(TRADES[trade])
    ship, place = draw.choice(SHIPS), draw.choice(PLACES)
    begins, ends, measure = WEATHER[draw.choice(sorted(WEATHER))]
    count = draw.choice(NUMBERS)
    he = pronoun.capitalize()
    upper = name[0].upper() + name[1:]
    opening = draw.choice(
        [
            f"On the {draw.choice(ORDINALS)} of {draw.choice(MONTHS)} {begins}.",
            f"That morning {begins}, and nobody was at {place}.",
            f"It was in {draw.choice(MONTHS)} that {begins}.",
        ]
    )
    middle = [
        f"{upper} the {trade} carried {cargo} to {place}.",
        f"The {ship} had been expected for {count} days.",
        f"{he} asked {friend} whether the {ship} was in sight.",
        f'"Not before {count} o\'clock," said {friend}.',
        f"Because of this, {measure}.",
        f"{he} set down {possessive} load and waited beside {friend}.",
        f"The harbour master wrote it in the book: {count} boats in, none out.",
        f"{upper} had known the captain of the {ship} since {possessive} childhood.",
    ]
    chosen = middle[:1] + [sentence for sentence in middle[1:] if draw.random() < 0.6]  # a pronoun needs its name first
    closing = draw.choice(
        [
            f"Towards evening {ends}, and the {ship} came in with {cargo}.",
            f"When {ends}, {name} went home with {friend}.",
            f"Then {ends}; {pronoun} took {possessive} {count} coins and paid for the bread.",
            f"At last {ends}. The {ship} lay at {place} as if nobody had ever doubted it.",
        ]
    )
    return " ".join([opening, *chosen, closing])


def text() -> str:
    draw = random.Random(SEED)
    return "\n\n".join(paragraph(draw) for _ in range(PARAGRAPHS)) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("harbour.txt").write_text(text(), encoding="utf-8")
