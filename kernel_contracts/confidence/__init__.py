"""Intervals, betting tests, clustering by prompt, multiplicity and sample sizes.

The unit of statistics is the prompt.  Verdicts use Clopper-Pearson (proportion of prompts) and the
betting bound (means and rates per prompt); both hold at every sample size.
"""

from kernel_contracts.confidence.betting import MeanBounds, MeanTest, mean_bounds, mean_test
from kernel_contracts.confidence.clusters import PromptSums, by_prompt, prompt_order
from kernel_contracts.confidence.multiplicity import (
    Rejections,
    benjamini_yekutieli,
    e_bh,
    holm,
    intersection_union,
)
from kernel_contracts.confidence.proportions import clopper_pearson, proportion_p_value

__all__ = [
    "MeanBounds",
    "MeanTest",
    "PromptSums",
    "Rejections",
    "benjamini_yekutieli",
    "by_prompt",
    "clopper_pearson",
    "e_bh",
    "holm",
    "intersection_union",
    "mean_bounds",
    "mean_test",
    "prompt_order",
    "proportion_p_value",
]
