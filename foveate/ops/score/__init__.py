"""score: how much each key, page or block matters to a query."""

from foveate.ops.dispatch import dispatch
from foveate.ops.score import indexer, low_rank, nodes, pooled, reference, retention
from foveate.ops.score.indexer import IndexerScores as IndexerScores
from foveate.ops.score.indexer import unseen_keys as unseen_keys
from foveate.ops.score.indexer import visible_keys as visible_keys
from foveate.ops.score.nodes import free_energy as free_energy
from foveate.ops.score.nodes import key_logits as key_logits
from foveate.ops.score.nodes import logit_deviation as logit_deviation
from foveate.ops.score.reference import query_mass as query_mass
from foveate.ops.score.reference import tile_mass as tile_mass
from foveate.ops.score.retention import Convolution as Convolution

INDEXER_BLOCK = indexer.BLOCK

column_mass = dispatch(reference.column_mass, "foveate.ops.score.column_mass_kernel", reference.check_column)
indexer_scores = dispatch(indexer.indexer_scores, "foveate.ops.score.indexer_kernel", indexer.check)
largest_logit = dispatch(nodes.largest_logit, "foveate.ops.score.bounds_kernel")
page_lse = dispatch(low_rank.page_lse, "foveate.ops.score.low_rank_kernel")
pooled_mass = dispatch(pooled.pooled_mass, "foveate.ops.score.pooled_kernel", pooled.check_mass)
pooled_mass_of_pages = dispatch(
    pooled.pooled_mass_of_pages, "foveate.ops.score.pooled_kernel", pooled.check_mass_of_pages
)
pooled_mass_of_records = dispatch(low_rank.pooled_mass_of_records, "foveate.ops.score.low_rank_kernel")
retention_logits = dispatch(retention.retention_logits, "foveate.ops.score.retention_kernel", retention.check_retention)
