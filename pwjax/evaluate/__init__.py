"""Quality of a quantized model, measured on text.

texts        Document, read_documents, heldout_documents: what is scored
windows      Window, tokenize, cut: text into windows of tokens, and which of them count
program      ScoreShapes, compile_score, plan_scoring: the compiled program and its share of the budget
scorer       Scorer: log-likelihood of every token, experts read from the arena under a memory budget
pressure     KVTrace, PressureScorer: the same through the engine, while a KV cache grows and precision moves
perplexity   Perplexity, measure_perplexity: perplexity with its standard error, bits per byte
comparison   Run, compare, paired_difference: two runs over the same windows
metrics      official metrics of tasks, pure functions of texts
tasks, run_tasks   read_items, run_items: tasks on local files through an engine
divergence   Divergence: KL divergence of any plan from 16 bits, a plan being a page table and nothing else
sampled_plans, measurements, truth   check_truth: is predicted damage what running the model loses?
"""

from pwjax.evaluate.comparison import Run as Run
from pwjax.evaluate.comparison import compare as compare
from pwjax.evaluate.comparison import paired_difference as paired_difference
from pwjax.evaluate.perplexity import Perplexity as Perplexity
from pwjax.evaluate.perplexity import measure_perplexity as measure_perplexity
from pwjax.evaluate.pressure import KVTrace as KVTrace
from pwjax.evaluate.pressure import PressureScorer as PressureScorer
from pwjax.evaluate.scorer import Scorer as Scorer
from pwjax.evaluate.texts import Document as Document
from pwjax.evaluate.texts import heldout_documents as heldout_documents
from pwjax.evaluate.texts import read_documents as read_documents
