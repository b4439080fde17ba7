"""Which tokens are drawn, and from what, for fixed logits and seeds: as they have always been. A target and a drafter
of different versions would otherwise not look at the same noise."""

import zlib

import numpy as np
import pytest
import torch

from outrider.actors.drafter.draw import draw
from outrider.actors.verification.search import TokenSubset
from outrider.cluster.link.messages import DraftSampling
from outrider.cluster.modes import Mode
from tests.unit.drafter.draw_cases import INF, SAMPLINGS, draw_of

ALL = SAMPLINGS | {
    "greedy-biased": DraftSampling(biases=((11, 6.0), (12, -INF))),
    "coupled-biased": DraftSampling(Mode.COUPLED, temperature=1.0, seed=12, biases=((11, 6.0), (12, -INF))),
    "coupled-min-p": DraftSampling(Mode.COUPLED, temperature=1.2, seed=-6, top_k=40, min_p=0.01),
}

# Of each sampling, from the whole vocabulary and from a cut one: the token, the alternatives, the token's probability,
# and of what it was drawn from, if that travels, a checksum of the possible tokens' ids and the first probability.
GOLDEN = {
    ("greedy", False): (1915, (1807, 1791), 0.06043, None, None),
    ("rejection", False): (76, (1646, 734), 0.76030, 2354689960, 0.76030),
    ("rejection-64", False): (1241, (1296, 1302), 0.04724, 469717698, 0.16728),
    ("block", False): (506, (1836, 1191), 0.10967, 3860063012, 0.29784),
    ("coupled", False): (7, (1839, 835), 0.00906, None, None),
    ("coupled-2", False): (1981, (120, 1074), 0.02387, None, None),
    ("one-hot", False): (1012, (1356, 1052), 0.05221, None, None),
    ("wide", False): (1471, (1027, 27), 0.00053, 847518339, 0.01274),
    ("biased", False): (11, (267, 1622), 0.62786, 2079555539, 0.62786),
    ("only", False): (50, (77, 3), 0.36940, 4492191, 0.62722),
    ("greedy-only", False): (50, (3, 77), 0.99293, None, None),
    ("coupled-only", False): (50, (77, 3), 0.50453, None, None),
    ("greedy-biased", False): (857, (90, 1535), 0.04430, None, None),
    ("coupled-biased", False): (1670, (174, 57), 0.00391, None, None),
    ("coupled-min-p", False): (1897, (844, 1054), 0.01871, None, None),
    ("greedy", True): (1915, (1068, 1645), 0.11648, None, None),
    ("rejection", True): (76, (644, 1189), 0.84373, 1537563664, 0.84373),
    ("rejection-64", True): (625, (1296, 1693), 0.05421, 3195491220, 0.22377),
    ("block", True): (214, (506, 240), 0.10679, 1225376070, 0.20647),
    ("coupled", True): (1839, (192, 178), 0.00190, None, None),
    ("coupled-2", True): (1981, (1074, 212), 0.04517, None, None),
    ("one-hot", True): (1012, (1356, 1052), 0.08872, None, None),
    ("wide", True): (1533, (1027, 1999), 0.00052, 4921985, 0.01943),
    ("biased", True): (99, (1622, 1514), 0.14146, 2256555597, 0.28924),
    ("only", True): (3, (), 1.00000, 871461106, 1.00000),
    ("greedy-only", True): (3, (), 1.00000, None, None),
    ("coupled-only", True): (3, (), 1.00000, None, None),
    ("greedy-biased", True): (1535, (894, 314), 0.04517, None, None),
    ("coupled-biased", True): (1670, (714, 896), 0.01128, None, None),
    ("coupled-min-p", True): (1109, (1897, 653), 0.01298, None, None),
}


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("one_by_one", [False, True])
def test_draws_are_those_of_the_record(cut, one_by_one):
    random = np.random.RandomState(20)  # its numbers are the same in every version of numpy
    logits = torch.from_numpy((random.randn(len(ALL), 2000) * 2).astype(np.float32))
    ids, subset = torch.from_numpy(random.permutation(2000)[:1100].astype(np.int64)), None
    if cut:
        logits, subset = logits[:, ids].contiguous(), TokenSubset(ids)
    draws = [draw_of(sampling, 100 + i, 100 + i - i % 3, alternatives=2) for i, sampling in enumerate(ALL.values())]
    if one_by_one:
        drawn = [draw(logits[i : i + 1], [one], subset)[0] for i, one in enumerate(draws)]
    else:
        drawn = draw(logits, draws, subset)
    for name, one in zip(ALL, drawn, strict=True):
        token, others, confidence, checksum, first = GOLDEN[name, cut]
        assert (one.token, tuple(other for other, _ in one.alternatives)) == (token, others), name
        assert one.confidence == pytest.approx(confidence, abs=1e-5)
        assert (one.q_ids is None) == (checksum is None)
        if one.q_ids is not None:
            assert zlib.crc32(one.q_ids[one.q_probs > 0].tobytes()) == checksum
            assert one.q_probs[0] == pytest.approx(first, abs=1e-5)
