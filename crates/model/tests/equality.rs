//! The property that everything else stands on: the bits of a token's logits depend on its sequence alone, not on how the
//! sequence was cut into chunks, what shared the batch, which blocks hold it, the block size, the number of threads, or
//! whether keys and values were computed here or came as bytes from another pool.

#![expect(clippy::unwrap_used, reason = "a failure here is a failed test")]

use homing_kv::BlockId;
use homing_model::{Chunk, ForwardError, KvStore, Model};
use proptest::prelude::*;
use std::sync::LazyLock;

static MODEL: LazyLock<Model> = LazyLock::new(|| Model::tiny(7));

const BLOCKS: u32 = 160;

/// A sequence, and how it is put through the model.
#[derive(Clone, Debug)]
struct Path {
    tokens: Vec<u32>,
    /// Lengths of the chunks, used over and over.
    cuts: Vec<usize>,
    /// After which chunk, if any, the sequence moves to other blocks, as bytes.
    moves: Option<usize>,
}

fn path() -> impl Strategy<Value = Path> {
    let tokens = prop::collection::vec(0u32..259, 1..120);
    let cuts = prop::collection::vec(prop_oneof![Just(1usize), 1usize..40], 1..6);
    (tokens, cuts, prop::option::of(0usize..4)).prop_map(|(tokens, cuts, moves)| Path { tokens, cuts, moves })
}

/// Logits after each token, each token computed alone in blocks of another size: the slowest way, taken as the truth.
fn one_by_one(tokens: &[u32]) -> Vec<Vec<u32>> {
    let mut kv = KvStore::new(MODEL.config(), 5, BLOCKS);
    let blocks: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let logits = (0u32..).zip(tokens).map(|(start, token)| {
        let chunk = Chunk {
            tokens: &[*token],
            start,
            blocks: &blocks,
            logits: true,
        };
        bits(MODEL.forward(&mut kv, &[chunk]).unwrap().remove(0).unwrap())
    });
    logits.collect()
}

fn bits(logits: Vec<f32>) -> Vec<u32> {
    logits.into_iter().map(f32::to_bits).collect()
}

/// One sequence on its way.
struct Walk<'a> {
    path: &'a Path,
    blocks: Vec<BlockId>,
    done: usize,
    chunks: usize,
    truth: Vec<Vec<u32>>,
}

impl Walk<'_> {
    fn is_over(&self) -> bool {
        self.done == self.path.tokens.len()
    }

    /// Where the next chunk ends.
    fn end(&self) -> usize {
        let cut = self.path.cuts[self.chunks % self.path.cuts.len()];
        (self.done + cut).min(self.path.tokens.len())
    }

    fn chunk(&self) -> Chunk<'_> {
        let tokens = &self.path.tokens[self.done..self.end()];
        Chunk {
            tokens,
            start: u32::try_from(self.done).unwrap(),
            blocks: &self.blocks,
            logits: true,
        }
    }

    /// Takes the sequence to other blocks, through bytes, and scribbles over the old ones. What the other blocks held
    /// after the sequence's last token stays: it must not matter.
    fn relocate(&mut self, kv: &mut KvStore, free: &mut impl Iterator<Item = BlockId>) {
        let block_size = kv.block_size() as usize;
        let others: Vec<BlockId> = free.take(self.blocks.len()).collect();
        for ((block, other), first) in self.blocks.iter().zip(&others).zip((0..).step_by(block_size)) {
            let tokens = u32::try_from(block_size.min(self.done.saturating_sub(first))).unwrap();
            let mut bytes = Vec::new();
            kv.read_block(*block, tokens, &mut bytes).unwrap();
            kv.write_block(*other, &bytes).unwrap();
            scribble(kv, *block);
        }
        self.blocks = others;
    }
}

fn scribble(kv: &mut KvStore, block: BlockId) {
    let bytes: Vec<u8> = (0..kv.block_bytes()).map(|index| (index % 61) as u8).collect();
    kv.write_block(block, &bytes).unwrap();
}

/// Puts the paths through together, a chunk of each a step, and compares the logits after each chunk.
fn check(paths: &[Path], block_size: u32, order: &[u32]) -> Result<(), TestCaseError> {
    let mut kv = KvStore::new(MODEL.config(), block_size, BLOCKS);
    (0..BLOCKS).for_each(|block| scribble(&mut kv, BlockId(block)));
    let mut free = order.iter().map(|index| BlockId(*index));
    let mut walks = Vec::new();
    for path in paths {
        let blocks: Vec<_> = free
            .by_ref()
            .take(path.tokens.len().div_ceil(block_size as usize))
            .collect();
        walks.push(Walk {
            path,
            blocks,
            done: 0,
            chunks: 0,
            truth: one_by_one(&path.tokens),
        });
    }
    while walks.iter().any(|walk| !walk.is_over()) {
        let chunks: Vec<Chunk<'_>> = walks.iter().filter(|walk| !walk.is_over()).map(Walk::chunk).collect();
        let mut logits = MODEL.forward(&mut kv, &chunks).unwrap().into_iter();
        for walk in walks.iter_mut().filter(|walk| !walk.is_over()) {
            walk.done = walk.end();
            let found = bits(logits.next().unwrap().unwrap());
            prop_assert_eq!(
                &found,
                &walk.truth[walk.done - 1],
                "after {} tokens of {:?}",
                walk.done,
                walk.path
            );
            if walk.path.moves == Some(walk.chunks) {
                walk.relocate(&mut kv, &mut free);
            }
            walk.chunks += 1;
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn logits_do_not_depend_on_the_path(
        paths in prop::collection::vec(path(), 1..4),
        block_size in prop_oneof![Just(16u32), Just(24), 6u32..40],
        order in Just((0..BLOCKS).collect::<Vec<_>>()).prop_shuffle(),
    ) {
        check(&paths, block_size, &order)?;
    }
}

#[test]
fn logits_do_not_depend_on_threads() {
    let tokens: Vec<u32> = (0..1200).map(|index| index * 31 % 259).collect();
    let blocks: Vec<BlockId> = (0..BLOCKS).map(BlockId).collect();
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        let mut kv = KvStore::new(MODEL.config(), 16, BLOCKS);
        let chunk = Chunk {
            tokens: &tokens,
            start: 0,
            blocks: &blocks,
            logits: true,
        };
        pool.install(|| bits(MODEL.forward(&mut kv, &[chunk]).unwrap().remove(0).unwrap()))
    };
    let alone = run(1);
    assert_eq!(run(2), alone);
    assert_eq!(run(5), alone);
}

#[test]
fn a_shared_prefix_is_read_by_two_sequences_and_written_by_none() {
    let prefix: Vec<u32> = (0..32).collect();
    let branches = [[40, 41, 42], [50, 51, 52]];
    let mut kv = KvStore::new(MODEL.config(), 16, 4);
    let shared = [BlockId(3), BlockId(1)];
    MODEL
        .forward(
            &mut kv,
            &[Chunk {
                tokens: &prefix,
                start: 0,
                blocks: &shared,
                logits: false,
            }],
        )
        .unwrap();
    let tables = [[shared[0], shared[1], BlockId(0)], [shared[0], shared[1], BlockId(2)]];
    let chunks: Vec<Chunk<'_>> = branches
        .iter()
        .zip(&tables)
        .map(|(tokens, blocks)| Chunk {
            tokens,
            start: 32,
            blocks,
            logits: true,
        })
        .collect();
    for (logits, branch) in MODEL.forward(&mut kv, &chunks).unwrap().into_iter().zip(branches) {
        let whole: Vec<u32> = prefix.iter().copied().chain(branch).collect();
        assert_eq!(Some(&bits(logits.unwrap())), one_by_one(&whole).last());
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    let blocks = [BlockId(0), BlockId(9)];
    let chunk = |tokens, start, blocks| Chunk {
        tokens,
        start,
        blocks,
        logits: true,
    };
    let check = |wrong: Chunk<'_>, expected: ForwardError| {
        let mut kv = KvStore::new(MODEL.config(), 16, 4);
        let good = chunk(&[1], 0, &blocks[..1]);
        assert_eq!(MODEL.forward(&mut kv, &[good, wrong]), Err(expected));
        let mut bytes = Vec::new();
        kv.read_block(BlockId(0), 16, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| *byte == 0), "nothing is written");
    };
    check(chunk(&[], 0, &blocks), ForwardError::Empty { chunk: 1 });
    check(
        chunk(&[1, 259], 0, &blocks[..1]),
        ForwardError::Token {
            chunk: 1,
            token: 259,
            vocab: 259,
        },
    );
    check(
        chunk(&[1], 16, &blocks[..1]),
        ForwardError::Blocks {
            chunk: 1,
            found: 1,
            expected: 2,
        },
    );
    check(
        chunk(&[1], 0, &blocks),
        ForwardError::NoSuchBlock {
            chunk: 1,
            block: 9,
            blocks: 4,
        },
    );
    let context_tokens = MODEL.config().context_tokens;
    let end = context_tokens + 1;
    let start = u32::try_from(context_tokens).unwrap();
    check(
        chunk(&[1], start, &blocks),
        ForwardError::Context {
            chunk: 1,
            end,
            context_tokens,
        },
    );
}
