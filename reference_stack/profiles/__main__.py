"""The door of the profiles: python -m reference_stack.profiles check | explain | suggest | args.

Exit: 0 done, 1 (check) a profile does not hold, 2 it cannot be done and a sentence says why.
"""

import argparse
import sys
from dataclasses import replace

from reference_stack.profiles import arguments, profile, rules, suggestions, telling
from reference_stack.profiles import model as models
from reference_stack.profiles.document import ProfileError
from reference_stack.profiles.profile import Profile, Stated

RENDERINGS = {"shell": arguments.shell, "yaml": arguments.kubernetes}
LENGTH, TYPICAL = 18432, 1400  # of what is suggested without a profile: as the shipped profiles have it


def main() -> int:
    """Do what the command line asks; the exit status."""
    asked = parse()
    try:
        return int(asked.do(asked))
    except ProfileError as error:
        sys.stderr.write(f"{error}\n")
        return 2


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="harness profile", description="Size an engine, and check that it fits its card."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    one = verbs.add_parser("check", help="say which profiles hold, and why others do not")
    one.add_argument("names", nargs="*", help="profiles, or files (default: all that ship)")
    one.set_defaults(do=check)
    one = verbs.add_parser("explain", help="the arithmetic of one profile, line by line")
    one.add_argument("name", help="a profile, or a file")
    one.add_argument("--model", help="another model, or a config.json")
    one.add_argument("--card", help="another card")
    one.add_argument("--quantization", choices=["none", "fp8", "int4"], help="other weights")
    one.add_argument("--tensor-parallel-size", type=count, help="so many GPUs")
    one.add_argument("--max-model-len", type=count, help="another length")
    one.set_defaults(do=explain)
    one = verbs.add_parser("suggest", help="the cards that a model fits, and how")
    one.add_argument("model", help="a model, or a config.json")
    one.add_argument("--card", action="append", help="only this one; may be given several times")
    one.add_argument("--max-model-len", type=count, default=LENGTH, help="tokens of prompt and answer (%(default)s)")
    one.add_argument("--typical", type=count, default=TYPICAL, help="tokens of a typical request (%(default)s)")
    one.set_defaults(do=suggest)
    one = verbs.add_parser("args", help="the arguments of vLLM")
    one.add_argument("name", help="a profile, or a file")
    one.add_argument(
        "--format", choices=RENDERINGS, default="shell", help="a command, or a container's command and args"
    )
    one.set_defaults(do=render)
    return parser.parse_args()


def count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a number above zero")
    return value


def check(asked: argparse.Namespace) -> int:
    """Judge profiles; 1 when one does not hold."""
    chosen = [profile.read(name) for name in asked.names or profile.names()]
    say(*telling.summary(chosen))
    for one in chosen:
        for breach in rules.breaches(one):
            say(f"{one.where(breach.key)}: {'' if breach.refuses else 'note: '}{breach.sentence}.")
    return int(any(rules.refused(one) for one in chosen))


def explain(asked: argparse.Namespace) -> int:
    """Show the arithmetic, and what would fit when it does not."""
    chosen = changed(profile.read(asked.name), asked)
    told = telling.explained(chosen)
    if rules.refused(chosen):
        found = fitting(chosen.model, chosen.vllm.max_model_len, chosen.typical_tokens)
        told += ["", *telling.proposed(found)]
    say(*told)
    return 0


def changed(chosen: Profile, asked: argparse.Namespace) -> Profile:
    """The profile with what the command line asks to be otherwise. What it states is then no longer true of it."""
    settings = {
        name: value for name in ("tensor_parallel_size", "max_model_len") if (value := getattr(asked, name)) is not None
    }
    if not (settings or asked.model or asked.card or asked.quantization):
        return chosen
    return replace(
        chosen,
        card=profile.read_card(asked.card) if asked.card else chosen.card,
        model=models.read(asked.model) if asked.model else chosen.model,
        quantization=asked.quantization or chosen.quantization,
        vllm=replace(chosen.vllm, **settings),
        stated=Stated(),
    )


def suggest(asked: argparse.Namespace) -> int:
    """The cards that would do for a model."""
    say(*telling.proposed(fitting(models.read(asked.model), asked.max_model_len, asked.typical, asked.card)))
    return 0


def fitting(model: models.Model, length: int, typical: int, cards: list[str] | None = None) -> list[Profile]:
    return suggestions.suggestions(model, length, typical, cards or profile.cards())


def render(asked: argparse.Namespace) -> int:
    """The arguments of vLLM. Raises ProfileError when the profile does not hold: it is not to be served."""
    chosen = profile.read(asked.name)
    for breach in rules.refused(chosen):
        raise ProfileError(f"{chosen.where(breach.key)}: {breach.sentence}.")
    say(RENDERINGS[asked.format](chosen))
    return 0


def say(*lines: str) -> None:
    """To the user."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
