//! `kv_transfer_params`, the object by which a decode worker learns where its KV is (vLLM 0.32's NIXL connector).
//!
//! A router passes P's answer to D word for word, as an [`Offer`](crate::transfer_offer::Offer); the types here are for the
//! worker, which makes and reads them, and for the few members that a router must look at. Members that nobody here knows are kept word for word. Two members are ours: the boot epoch of the
//! worker that holds the KV and a hash of the prompt that it is for, because params that outlive a restart or go with
//! another prompt of the same length would be answered with the wrong KV.

use crate::openai::{ApiError, Body};
use bytes::Bytes;
use homing_kv::{BlockHash, chain};
use homing_units::BootEpoch;

/// Block ids in one object; more are refused. A block of 16 tokens and a context of 2^22 tokens fit.
pub const MAX_REMOTE_BLOCKS: usize = 1 << 18;

/// The object, in any of its three uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferParams {
    /// To P: hold the prompt's KV for a decode worker.
    pub do_remote_decode: bool,
    /// To D: the KV lies at the place that the other members name.
    pub do_remote_prefill: bool,
    /// P's blocks in the prompt's order, one list a KV cache group.
    pub remote_block_ids: Option<Vec<Vec<u32>>>,
    /// P's engine.
    pub remote_engine_id: Option<String>,
    /// P's own id of the request.
    pub remote_request_id: Option<String>,
    /// Where P answers pulls.
    pub remote_host: Option<String>,
    /// Where P answers pulls.
    pub remote_port: Option<u16>,
    /// P's tensor-parallel size.
    pub tp_size: Option<u32>,
    /// The prompt's tokens whose KV is on offer.
    pub remote_num_tokens: Option<u32>,
    /// `pull`.
    pub transfer_mode: Option<String>,
    /// Prompt tokens that P had in its cache.
    pub remote_prefill_cached_tokens: Option<u32>,
    /// Ours: P's life.
    pub remote_boot_epoch: Option<BootEpoch>,
    /// Ours: the hash of the whole prompt (see [`prompt_hash`]).
    pub remote_prompt_hash: Option<BlockHash>,
    /// Members that nobody here knows: name and JSON text.
    pub other: Vec<(String, Bytes)>,
}

/// The hash of a whole prompt, the partial last block included, by which both sides know that they mean the same one.
#[must_use]
pub fn prompt_hash(tokens: &[u32]) -> BlockHash {
    chain(None, tokens)
}

impl TransferParams {
    /// What a router sends to P.
    #[must_use]
    pub fn remote_decode() -> Self {
        Self {
            do_remote_decode: true,
            ..Self::default()
        }
    }

    /// Reads the object from its JSON text.
    ///
    /// # Errors
    /// If it is no object or a member that is known has another type.
    pub fn parse(json: &Bytes) -> Result<Self, ApiError> {
        let body = Body::parse(json)?;
        let text = |name: &str| body.read::<String>(name, "a string");
        let number = |name: &str| body.read::<u32>(name, "an integer of at least 0");
        let flag = |name: &str| body.read::<bool>(name, "true or false").map(Option::unwrap_or_default);
        Ok(Self {
            do_remote_decode: flag("do_remote_decode")?,
            do_remote_prefill: flag("do_remote_prefill")?,
            remote_block_ids: block_ids(&body)?,
            remote_engine_id: text("remote_engine_id")?,
            remote_request_id: text("remote_request_id")?,
            remote_host: text("remote_host")?,
            remote_port: body.read("remote_port", "a port number")?,
            tp_size: number("tp_size")?,
            remote_num_tokens: number("remote_num_tokens")?,
            transfer_mode: text("transfer_mode")?,
            remote_prefill_cached_tokens: number("remote_prefill_cached_tokens")?,
            remote_boot_epoch: body
                .read::<u64>("remote_boot_epoch", "an integer of at least 0")?
                .map(BootEpoch),
            remote_prompt_hash: hash(&body)?,
            other: body
                .members()
                .filter(|(name, _)| !KNOWN.contains(name))
                .map(|(name, value)| (name.to_owned(), value.clone()))
                .collect(),
        })
    }

    /// The JSON text: the flags and what is known, then the members that nobody here knows.
    #[must_use]
    pub fn to_json(&self) -> Bytes {
        fn put<T: serde::Serialize>(body: &mut Body, name: &str, value: Option<&T>) {
            if let Some(value) = value {
                body.set(name, value);
            }
        }
        let mut body = Body::default();
        body.set("do_remote_prefill", &self.do_remote_prefill);
        body.set("do_remote_decode", &self.do_remote_decode);
        put(&mut body, "remote_block_ids", self.remote_block_ids.as_ref());
        put(&mut body, "remote_engine_id", self.remote_engine_id.as_ref());
        put(&mut body, "remote_request_id", self.remote_request_id.as_ref());
        put(&mut body, "remote_host", self.remote_host.as_ref());
        put(&mut body, "remote_port", self.remote_port.as_ref());
        put(&mut body, "tp_size", self.tp_size.as_ref());
        put(&mut body, "remote_num_tokens", self.remote_num_tokens.as_ref());
        put(&mut body, "transfer_mode", self.transfer_mode.as_ref());
        put(
            &mut body,
            "remote_prefill_cached_tokens",
            self.remote_prefill_cached_tokens.as_ref(),
        );
        put(&mut body, "remote_boot_epoch", self.remote_boot_epoch.as_ref());
        put(
            &mut body,
            "remote_prompt_hash",
            self.remote_prompt_hash.map(|hash| hash.to_string()).as_ref(),
        );
        for (name, value) in &self.other {
            body.set_raw(name, value.clone());
        }
        body.to_bytes()
    }
}

const KNOWN: [&str; 13] = [
    "do_remote_decode",
    "do_remote_prefill",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "remote_num_tokens",
    "transfer_mode",
    "remote_prefill_cached_tokens",
    "remote_boot_epoch",
    "remote_prompt_hash",
];

fn block_ids(body: &Body) -> Result<Option<Vec<Vec<u32>>>, ApiError> {
    #[derive(serde::Deserialize)]
    #[serde(untagged)]
    enum Shape {
        Flat(Vec<u32>),
        Groups(Vec<Vec<u32>>),
    }
    let shape = body.read("remote_block_ids", "a list of lists of block ids")?;
    let groups = shape.map(|shape| match shape {
        // Releases before cache groups sent one flat list.
        Shape::Flat(blocks) => vec![blocks],
        Shape::Groups(groups) => groups,
    });
    let count: usize = groups.iter().flatten().map(Vec::len).sum();
    match count > MAX_REMOTE_BLOCKS {
        true => Err(ApiError::invalid(format!(
            "`remote_block_ids` has `{count}` blocks, expected at most {MAX_REMOTE_BLOCKS}"
        ))
        .with_param("remote_block_ids")),
        false => Ok(groups),
    }
}

fn hash(body: &Body) -> Result<Option<BlockHash>, ApiError> {
    const EXPECTED: &str = "32 hexadecimal digits";
    let Some(text) = body.read::<String>("remote_prompt_hash", EXPECTED)? else {
        return Ok(None);
    };
    let digits = Some(&text).filter(|text| text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit()));
    digits
        .and_then(|text| u128::from_str_radix(text, 16).ok())
        .map(|hash| Some(BlockHash(hash)))
        .ok_or_else(|| {
            ApiError::invalid(format!("`remote_prompt_hash` is `{text}`, expected {EXPECTED}"))
                .with_param("remote_prompt_hash")
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::AnswerView;

    #[test]
    fn vllms_answer_is_read_and_written_again() {
        let answer = Bytes::from_static(include_bytes!("../tests/fixtures/vllm-0.32-prefill-answer.json"));
        let json = AnswerView::parse(&answer)
            .and_then(|view| view.kv_transfer_params)
            .expect("it has params");
        let params = TransferParams::parse(&json).expect("vLLM's form");
        assert!(params.do_remote_prefill && !params.do_remote_decode);
        assert_eq!(params.remote_block_ids, Some(vec![vec![670, 671, 672, 673]]));
        assert_eq!((params.remote_port, params.remote_num_tokens), (Some(5601), Some(100)));
        assert_eq!(params.transfer_mode.as_deref(), Some("pull"));
        let kept: Vec<&str> = params.other.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(kept, ["dcp_size", "pp_size", "remote_blocks_expiry_time"]);
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(params));
    }

    #[test]
    fn ours_go_with_it() {
        let params = TransferParams {
            remote_boot_epoch: Some(BootEpoch(u64::MAX)),
            remote_prompt_hash: Some(prompt_hash(&[1, 2, 3])),
            other: vec![("x".to_owned(), Bytes::from_static(b"1.50e1"))],
            ..TransferParams::remote_decode()
        };
        assert_eq!(TransferParams::parse(&params.to_json()), Ok(params.clone()));
        assert!(params.to_json().ends_with(br#","x":1.50e1}"#), "word for word");
        assert_ne!(prompt_hash(&[1, 2, 3]), prompt_hash(&[1, 2, 4]));
    }

    #[test]
    fn nulls_and_wrong_members() {
        let parse = |text: &'static str| TransferParams::parse(&Bytes::from_static(text.as_bytes()));
        let nulls = r#"{"do_remote_decode":true,"remote_engine_id":null,"remote_block_ids":null,"remote_port":null}"#;
        assert_eq!(parse(nulls), Ok(TransferParams::remote_decode()));
        assert_eq!(
            parse(r#"{"remote_block_ids":[1,2]}"#).expect("flat").remote_block_ids,
            Some(vec![vec![1, 2]])
        );
        for wrong in [
            "[]",
            r#"{"remote_port":70000}"#,
            r#"{"remote_block_ids":[[-1]]}"#,
            r#"{"do_remote_decode":1}"#,
            r#"{"remote_prompt_hash":"+0000000000000000000000000000001"}"#,
        ] {
            assert_eq!(parse(wrong).expect_err(wrong).status, 400, "{wrong}");
        }
    }
}
