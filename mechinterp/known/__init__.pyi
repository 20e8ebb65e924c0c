"""Public names of this folder with their types; __init__.py reads them here and loads them when they are first used."""

from mechinterp.known.comparing import compare_submissions as compare_submissions
from mechinterp.known.entries import Entry as Entry
from mechinterp.known.entries import Suite as Suite
from mechinterp.known.entries import suite as suite
from mechinterp.known.judging import judge_sampler as judge_sampler
from mechinterp.known.scores import score as score
from mechinterp.known.submissions import Submission as Submission
from mechinterp.known.submissions import read_submission as read_submission
