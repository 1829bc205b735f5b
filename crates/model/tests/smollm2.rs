//! SmolLM2 answers sensibly, and the same whichever way the prompt was cut. Skipped, loudly, where it is not in the cache: a
//! test must not download a hundred megabytes.

#![expect(clippy::unwrap_used, reason = "a failure here is a failed test")]

use homing_kv::BlockId;
use homing_model::{Bundle, ChatInput, Chunk, KvStore, ModelSpec, cached, default_cache_dir, open};
use serde_json::json;

const BLOCKS: u32 = 16;

fn smollm2() -> Option<Bundle> {
    let spec = ModelSpec::SmolLm2;
    if cached(&spec, &default_cache_dir()).is_none() {
        eprintln!("SKIPPED: SmolLM2 is not in the cache; `homing up --model smollm2` fetches it");
        return None;
    }
    Some(open(&spec, &default_cache_dir()).unwrap())
}

/// The likeliest tokens after a prompt that is prefilled in chunks of this size, up to the end of the answer.
fn answer(bundle: &Bundle, prompt: &[u32], chunk: usize, limit: usize) -> Vec<u32> {
    let mut kv = KvStore::new(bundle.model.config(), 16, BLOCKS);
    let blocks: Vec<BlockId> = (0..BLOCKS).rev().map(BlockId).collect();
    let (mut sequence, mut done) = (prompt.to_vec(), 0);
    while sequence.len() < prompt.len() + limit {
        let end = (done + chunk).min(sequence.len());
        let piece = Chunk {
            tokens: &sequence[done..end],
            start: u32::try_from(done).unwrap(),
            blocks: &blocks,
            logits: end == sequence.len(),
        };
        let logits = bundle.model.forward(&mut kv, &[piece]).unwrap().remove(0);
        done = end;
        let Some(logits) = logits else { continue };
        let (best, _) = (0u32..)
            .zip(&logits)
            .max_by(|(_, left), (_, right)| left.total_cmp(right))
            .unwrap();
        if bundle.vocabulary.tokenizer.is_end(best) {
            break;
        }
        sequence.push(best);
    }
    sequence.split_off(prompt.len())
}

#[test]
fn it_knows_the_capital_of_france() {
    let Some(bundle) = smollm2() else { return };
    let tokenizer = &bundle.vocabulary.tokenizer;
    let prompt = tokenizer.encode_prompt("The capital of France is");
    assert_eq!(tokenizer.decode(&answer(&bundle, &prompt, 64, 2)), " Paris.");
    let messages = json!([{"role": "user", "content": "What is the capital of France?"}]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: true,
        unix_seconds: 0,
    };
    let prompt = bundle.vocabulary.encode_chat(&input).unwrap();
    let whole = answer(&bundle, &prompt, 64, 12);
    assert_eq!(tokenizer.decode(&whole), "The capital of France is Paris.");
    assert_eq!(answer(&bundle, &prompt, 7, 12), whole, "in chunks of 7");
}

/// Token ids that the `tokenizers` Python package gives with SmolLM2's own tokenizer.
#[test]
fn it_splits_text_as_its_own_tokenizer_does() {
    let Some(bundle) = smollm2() else { return };
    let tokenizer = &bundle.vocabulary.tokenizer;
    let text = "Hello 123, it's  a test\n\n  né <|im_start|>user";
    let tokens = [
        19556, 216, 33, 34, 35, 28, 357, 506, 216, 253, 1028, 8866, 304, 2756, 216, 1, 4093,
    ];
    assert_eq!(tokenizer.encode(text), tokens);
    assert_eq!(tokenizer.decode(&tokens), "Hello 123, it's  a test\n\n  né user");
    assert_eq!(tokenizer.end_tokens(), [0, 2]);
    assert_eq!(tokenizer.bos(), None);
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let input = ChatInput {
        messages: &messages,
        tools: None,
        add_generation_prompt: false,
        unix_seconds: 0,
    };
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
        <|im_start|>user\nHi<|im_end|>\n";
    assert_eq!(bundle.vocabulary.render(&input).as_deref(), Ok(expected));
}
