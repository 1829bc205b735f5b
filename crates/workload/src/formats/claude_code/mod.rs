//! Coding-agent traces (the form of kv-cache-tester): one session a line, with its requests in order and those of its
//! sub-agents nested.
//!
//! Order. A request follows the one before it. Sub-agent entries in a row run side by side after the request before
//! them (fork), and the request after them waits for them all (join). A sub-agent's `t` is when it was done: `t` less
//! `duration_ms` falls on the end of the forking request, for all of a group.
//!
//! Gaps. The gap of a request is the time from the end of what it waits for to its own start. `think_time` is that,
//! where it was given and the request before it has an `api_time`; a `think_time` after a request without one counts
//! from some earlier request, and one after sub-agents contains their work. In these cases, and where `think_time` is
//! missing, the gap is the distance of the recorded times, never below zero; a missing `api_time` is then estimated
//! from the request's output and the session's own seconds per output token.
//!
//! Boilerplate. Ids are local, but sessions of one version of the agent begin with the same tools and system prompt: the
//! whole blocks of `tool_tokens + system_tokens` with which a session's first prompt begins get ids of the version, wherever
//! a root prompt of the session has them at the same place. Which sessions are of one version, and what is assumed there,
//! is `boilerplate`'s. [`ReadOptions::shared_boilerplate`](super::ReadOptions) switches it off.
//!
//! Other ids are local to the session. Sub-agents of a session share what their ids share among themselves, but nothing with
//! the root agent, even where the numbers are the same.

mod boilerplate;
mod session;
#[cfg(test)]
mod tests;

use super::fields::Object;
use super::{LineReader, TraceProblem};
use crate::trace::Session;
use boilerplate::{Boilerplate, Versions};
use session::Builder;
use std::collections::BTreeMap;

/// Reads sessions.
#[derive(Debug)]
pub(super) struct Reader {
    block_size: u32,
    shared_boilerplate: bool,
    versions: Versions,
    /// The sessions read so far, to refuse a second one of the same name.
    ids: BTreeMap<String, usize>,
}

impl LineReader for Reader {
    fn read(&mut self, line: &Object<'_>, sessions: &mut Vec<Session>) -> Result<(), TraceProblem> {
        let id: String = line.required("id", "the session's name")?;
        if let Some(other) = self.ids.insert(id.clone(), sessions.len()) {
            return Err(line.wrong(
                "id",
                &id,
                &format!("a name of its own: session {} has it too", other + 1),
            ));
        }
        self.check_block_size(line)?;
        let local = has_local_ids(line)?;
        let requests = line.objects("requests")?;
        if requests.is_empty() {
            return Err(line.wrong("requests", "[]", "at least one request"));
        }
        let boilerplate = self.boilerplate(line)?.filter(|_| local);
        let index = local.then(|| u32::try_from(sessions.len()).expect("the caller bounds the sessions"));
        let turns = Builder::new(self.block_size, index, boilerplate, &requests)?.turns(&requests)?;
        if turns.is_empty() {
            return Err(line.wrong("requests", "sub-agents without requests", "at least one request"));
        }
        sessions.push(Session { id, start: None, turns });
        Ok(())
    }

    fn block_size(&self) -> u32 {
        self.block_size
    }
}

impl Reader {
    pub(super) const fn new(shared_boilerplate: bool) -> Self {
        Self {
            block_size: 0,
            shared_boilerplate,
            versions: Versions::new(),
            ids: BTreeMap::new(),
        }
    }

    /// The boilerplate with which the session begins, where it is shared.
    fn boilerplate(&mut self, line: &Object<'_>) -> Result<Option<Boilerplate>, TraceProblem> {
        let tools = line.optional_tokens("tool_tokens", OUTPUT)?.unwrap_or(0);
        let system = line.optional_tokens("system_tokens", OUTPUT)?.unwrap_or(0);
        if !self.shared_boilerplate {
            return Ok(None);
        }
        Ok(self.versions.of(tools, system, self.block_size))
    }

    /// All sessions of a trace have blocks of one size.
    fn check_block_size(&mut self, line: &Object<'_>) -> Result<(), TraceProblem> {
        let block_size = line.required_positive("block_size", "a number of tokens, at least 1")?;
        if self.block_size == 0 {
            self.block_size = block_size;
        }
        if block_size == self.block_size {
            return Ok(());
        }
        let expected = format!("{}, the block size of the lines before", self.block_size);
        Err(line.wrong("block_size", &block_size.to_string(), &expected))
    }
}

/// Whether the ids mean something in this session only; so they do where nothing is said.
fn has_local_ids(line: &Object<'_>) -> Result<bool, TraceProblem> {
    let expected = "`local` or `global`";
    match line.optional::<String>("hash_id_scope", expected)?.as_deref() {
        None | Some("local") => Ok(true),
        Some("global") => Ok(false),
        Some(other) => Err(line.wrong("hash_id_scope", other, expected)),
    }
}

const OUTPUT: &str = "a number of tokens";
