"""Device memory: one arena of pages, who owns them, the tables that point at them, and the pager that moves them."""

# The arena and its owner
from pwjax.memory.allocator import PageAllocator as PageAllocator
from pwjax.memory.allocator import PageError as PageError
from pwjax.memory.arena import Arena as Arena
from pwjax.memory.arena import commit_programs as commit_programs
from pwjax.memory.arena import program_memory as program_memory

# Moves
from pwjax.memory.host_store import HostStore as HostStore

# Tenants
from pwjax.memory.kv import KVKind as KVKind
from pwjax.memory.kv import KVPages as KVPages
from pwjax.memory.page_table import PageTable as PageTable
from pwjax.memory.page_table import PageTableState as PageTableState
from pwjax.memory.pager import Pager as Pager
from pwjax.memory.prefix import Prefix as Prefix
from pwjax.memory.prefix import Prefixes as Prefixes
from pwjax.memory.report import BoundaryReport as BoundaryReport
from pwjax.memory.report import Commit as Commit
from pwjax.memory.report import Counters as Counters
from pwjax.memory.report import Outcome as Outcome
from pwjax.memory.transfer import SyncTransfer as SyncTransfer
from pwjax.memory.transfer import ThreadTransfer as ThreadTransfer
from pwjax.memory.transfer import TransferError as TransferError
