//! Which blocks may cross to or from another worker at this moment.
//!
//! A transfer takes many small reads or writes with the engine's steps between them. Each asks here first: an export
//! whose lease has ended and an import that was given up are not in these maps any more, so no byte is read from or
//! written into a block that belongs to someone else by then.

use crate::backend::NamedBlock;
use crate::request::Request;
use homing_engine::api::Import;
use homing_kv::{BlockHash, BlockId};
use homing_units::{Instant, RequestId};
use std::collections::BTreeMap;

/// A prompt's KV, held for a puller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportView {
    /// The request that computed it.
    pub id: RequestId,
    /// The prompt's blocks in order; the last may be partial.
    pub blocks: Vec<BlockId>,
    /// The prompt's length in tokens.
    pub tokens: u32,
    /// The hash of the whole prompt.
    pub prompt_hash: BlockHash,
    /// When the blocks are released if nobody acknowledges.
    pub lease_ends: Instant,
}

/// Blocks under transfer.
#[derive(Clone, Debug)]
struct Held {
    /// Index, in the prompt, of the first of them.
    first: u32,
    blocks: Vec<NamedBlock>,
}

/// The transfers that are alive. Bounded by the engine's live requests and its pool.
#[derive(Debug, Default)]
pub struct Transfers {
    exports: BTreeMap<RequestId, (ExportView, Held)>,
    imports: BTreeMap<RequestId, Held>,
}

impl Transfers {
    /// Opens a prompt's blocks for reading.
    pub fn open_export(&mut self, view: ExportView, request: &Request, block_size: u32) {
        let held = Held::new(0, &view.blocks, request, block_size);
        self.exports.insert(view.id, (view, held));
    }

    /// The lease of a prompt's blocks has begun anew.
    pub fn renew(&mut self, id: RequestId, lease_ends: Instant) {
        if let Some((view, _)) = self.exports.get_mut(&id) {
            view.lease_ends = lease_ends;
        }
    }

    /// Ends reading.
    pub fn close_export(&mut self, id: RequestId) {
        self.exports.remove(&id);
    }

    /// Opens the blocks of an import for writing.
    pub fn open_import(&mut self, import: &Import, request: &Request, block_size: u32) {
        self.imports.insert(
            import.id,
            Held::new(import.first_block, &import.blocks, request, block_size),
        );
    }

    /// Ends writing; says whether it was open.
    pub fn close_import(&mut self, id: RequestId) -> bool {
        self.imports.remove(&id).is_some()
    }

    /// The export of a request, while it is held.
    #[must_use]
    pub fn export(&self, id: RequestId) -> Option<&ExportView> {
        self.exports.get(&id).map(|(view, _)| view)
    }

    /// The block at `index` of an exported prompt.
    #[must_use]
    pub fn readable(&self, id: RequestId, index: u32) -> Option<NamedBlock> {
        self.exports.get(&id)?.1.at(index)
    }

    /// The block at `index` of a prompt that is being pulled.
    #[must_use]
    pub fn writable(&self, id: RequestId, index: u32) -> Option<NamedBlock> {
        self.imports.get(&id)?.at(index)
    }

    /// Imports that may be written.
    #[must_use]
    pub fn imports(&self) -> usize {
        self.imports.len()
    }
}

impl Held {
    fn new(first: u32, blocks: &[BlockId], request: &Request, block_size: u32) -> Self {
        let prompt = &request.prompt;
        let named = |(index, block): (u32, &BlockId)| {
            // A whole block is named by its chained hash, a partial last one by the whole prompt's.
            let whole = prompt.blocks.get(index as usize).copied();
            NamedBlock {
                block: *block,
                tokens: if whole.is_some() {
                    block_size
                } else {
                    prompt.tokens % block_size
                },
                name: whole.unwrap_or(request.prompt_hash),
            }
        };
        Self {
            first,
            blocks: (first..).zip(blocks).map(named).collect(),
        }
    }

    fn at(&self, index: u32) -> Option<NamedBlock> {
        self.blocks.get(index.checked_sub(self.first)? as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_engine::api::Transfer;

    #[test]
    fn only_blocks_under_transfer_are_open() {
        let request = Request::greedy([1, 2, 3, 4, 5], 2, 1, Transfer::Import { tokens: 5 });
        let (id, name) = (RequestId(1), request.prompt_hash);
        let mut transfers = Transfers::default();
        let blocks = vec![BlockId(7), BlockId(8)];
        transfers.open_import(
            &Import {
                id,
                first_block: 1,
                blocks,
                deadline: Instant::ZERO,
            },
            &request,
            2,
        );
        let check = |transfers: &Transfers, index, expected: Option<(u32, u32, BlockHash)>| {
            let expected = expected.map(|(block, tokens, name)| NamedBlock {
                block: BlockId(block),
                tokens,
                name,
            });
            assert_eq!(transfers.writable(id, index), expected, "{index}");
        };
        check(&transfers, 0, None);
        check(&transfers, 1, Some((7, 2, request.prompt.blocks[1])));
        check(&transfers, 2, Some((8, 1, name)));
        check(&transfers, 3, None);
        assert!(transfers.close_import(id) && !transfers.close_import(id));
        check(&transfers, 1, None);
        assert_eq!(transfers.imports(), 0);
    }
}
