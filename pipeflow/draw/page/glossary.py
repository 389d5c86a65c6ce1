"""Glossary: what the figures and words of a page mean, each in a sentence. Must not contain: how they are computed."""

from __future__ import annotations

from pipeflow.draw.captions import escaped

GLOSSARY = {
    "rank": "One process of the pipeline. Each row of the picture is a rank.",
    "stage": "A consecutive piece of the model, which one rank holds.",
    "chunk": "A rank may hold several pieces of the model; the chunk says which of them.",
    "microbatch": "A part of the batch. The number in a block is its microbatch.",
    "forward": "Computes the output of a stage, which the next stage needs.",
    "backward": "Computes the gradients of a stage, from the last stage to the first.",
    "input gradient": "The half of a backward for which the stage before waits.",
    "weight gradient": "The half of a backward for which no other rank waits, so it can fill idle time.",
    "idle": "Time in which a rank computes nothing, because it waits for another rank.",
    "makespan": "The time of a whole step, from its start to its last end.",
    "span": "The longest time from a rank's first start to its last end.",
    "bubble of span": "The idle part of the span, as papers on zero-bubble schedules count it.",
    "bubble": "The part of the step in which the busiest rank is idle. Less is better.",
    "exposed": "The time by which reductions and other streams outlast the computations.",
    "work of the busiest rank": "The time that the rank with the most work computes.",
    "busy": "The part of the step in which a rank computes.",
    "peak activations": "The most microbatches of which a rank keeps activations at once: its memory.",
    "peak memory": "The most bytes that a rank keeps for its backwards at once.",
    "peak": "The most that a rank keeps for its backwards at once.",
    "activations kept": "Results of forwards that a rank keeps until their backwards have run.",
    "transfers": "How many values the ranks send to each other in a step.",
    "weight copies": "How many copies of each weight the ranks hold.",
    "critical path": "The chain of blocks and transfers that takes as long as the step; only a shorter chain helps.",
    "makespan bound": "No order of the same actions can be faster than this.",
}


def tip_of(text: str, more: str = "") -> str:
    """The attributes of an element with this text: the class `more`, and the meaning of the word that it begins with.

    >>> tip_of("bubble 27.3%")
    ' class="word" title="The part of the step in which the busiest rank is idle. Less is better."'
    >>> tip_of("bubbles", "by-kind")
    ' class="by-kind"'
    """
    words = [word for word in GLOSSARY if text == word or text.startswith(f"{word} ")]
    classes = " ".join(filter(None, [more, "word" if words else ""]))
    title = f' title="{escaped(GLOSSARY[max(words, key=len)])}"' if words else ""
    return (f' class="{classes}"' if classes else "") + title


def glossary_list() -> str:
    """All words with their meanings, as a list in HTML."""
    entries = (f"<dt>{escaped(word)}</dt><dd>{escaped(meaning)}</dd>" for word, meaning in sorted(GLOSSARY.items()))
    return f"<dl>\n{chr(10).join(entries)}\n</dl>"
