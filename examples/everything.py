"""A method that no paper has: three drafters that know different things propose one tree.

    longdraft generate --load examples/everything.py --method everything --file report.txt -p "Summarise this."
    longdraft bench --load examples/everything.py --methods ar,specextend,everything --data prompts.jsonl

Prompt lookup knows what the prompt says, TokenSwift's phrases what the output repeats, and SpecExtend's small language
model, on the chunks that the target attends to, what comes next. The planner keeps the likeliest nodes of all three,
and asks the small model only where the lookups are not sure.
"""

from longdraft import compose
from longdraft.drafters.combined import CombinedDrafter
from longdraft.drafters.small_lm import SmallLMDrafter
from longdraft.drafters.suffix import SuffixDrafter
from longdraft.drafters.tokenswift import ReuseDrafter


def drafter(draft):
    model = SmallLMDrafter(draft, view="retrieval")  # an OPT-Tree on a view of its own KV
    return CombinedDrafter(SuffixDrafter(), CombinedDrafter(ReuseDrafter(), model))


compose("everything", drafter, draft="small-lm", summary="lookups, phrases of the output and SpecExtend in one tree")
