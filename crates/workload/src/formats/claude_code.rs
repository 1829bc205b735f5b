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
//! Boilerplate. Ids are local, but sessions of one version of the agent begin with the same tools and system prompt,
//! `tool_tokens + system_tokens` long. Sessions that agree in both figures are taken for one version: the whole blocks of
//! that length with which a session's first prompt begins get ids of the version, wherever a root prompt of the session
//! has them at the same place. [`ReadOptions::shared_boilerplate`](super::ReadOptions) switches that off.
//!
//! Other ids are local to the session. Sub-agents of a session share what their ids share among themselves, but nothing with
//! the root agent, even where the numbers are the same.

use super::fields::Object;
use super::{LineReader, TraceProblem};
use crate::content::{Scope, local_id};
use crate::ids::share;
use crate::trace::{Session, Turn};
use homing_units::Duration;
use std::collections::BTreeMap;

/// Sub-agents may have sub-agents, but not without end.
const MAX_DEPTH: u32 = 16;

/// Reads sessions.
#[derive(Debug)]
pub(super) struct Reader {
    block_size: u32,
    shared_boilerplate: bool,
    /// The versions of the agent so far, by their figures.
    versions: BTreeMap<(u32, u32), u32>,
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
        let mut builder = Builder {
            block_size: self.block_size,
            boilerplate: Vec::new(),
            version: self.version(line)?.filter(|_| local),
            session: local.then(|| u32::try_from(sessions.len()).expect("the caller bounds the sessions")),
            seconds_per_token: seconds_per_token(&requests)?,
            turns: Vec::new(),
            agents: 1,
        };
        builder.agent(0, &requests, &Fork::default(), 0)?;
        if builder.turns.is_empty() {
            return Err(line.wrong("requests", "sub-agents without requests", "at least one request"));
        }
        share(&mut builder.turns);
        sessions.push(Session {
            id,
            start: None,
            turns: builder.turns,
        });
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
            versions: BTreeMap::new(),
            ids: BTreeMap::new(),
        }
    }

    /// The version of the session's agent, where it has boilerplate that is shared.
    fn version(&mut self, line: &Object<'_>) -> Result<Option<Version>, TraceProblem> {
        let tools: u32 = line.optional("tool_tokens", OUTPUT)?.unwrap_or(0);
        let system: u32 = line.optional("system_tokens", OUTPUT)?.unwrap_or(0);
        let blocks = (tools.saturating_add(system) / self.block_size).min(Version::BLOCKS_MAX);
        if !self.shared_boilerplate || blocks == 0 {
            return Ok(None);
        }
        let next = self.versions.len() as u32;
        let number = *self.versions.entry((tools, system)).or_insert(next);
        // Beyond that many versions there are no ids; such sessions share nothing.
        Ok((number < Version::COUNT_MAX).then_some(Version { number, blocks }))
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

/// The server's seconds for each output token over the requests that say both; 0 where none does.
fn seconds_per_token(requests: &[Object<'_>]) -> Result<f64, TraceProblem> {
    let (mut seconds, mut tokens) = (0.0, 0.0);
    for request in requests {
        if let (Some(api_time), Some(out)) = (api_time(request)?, request.optional::<u32>("out", OUTPUT)?) {
            seconds += api_time;
            tokens += f64::from(out);
        }
    }
    Ok(if tokens > 0.0 { seconds / tokens } else { 0.0 })
}

const OUTPUT: &str = "a number of tokens";

fn api_time(request: &Object<'_>) -> Result<Option<f64>, TraceProblem> {
    request.optional_not_negative("api_time", "the server's time in seconds, at least 0")
}

/// What an agent's next request waits for.
#[derive(Clone, Default)]
struct Fork {
    /// The turns, by index.
    after: Vec<u32>,
    /// When the last of them ended, in seconds from the session's start.
    end: f64,
    /// When the agent's own clock started, in the same seconds.
    base: f64,
    /// Whether `end` was recorded, by one request of the same agent: its `think_time` counts from there.
    exact: bool,
}

/// A version of an agent.
#[derive(Clone, Copy, Debug)]
struct Version {
    number: u32,
    /// Whole blocks of its boilerplate.
    blocks: u32,
}

impl Version {
    /// Ids below 2^39 are nobody's own: so many versions of so many blocks have room there.
    const BLOCKS_MAX: u32 = 1 << 20;
    const COUNT_MAX: u32 = (1 << 19) - 1;

    fn id(self, block: usize) -> u64 {
        ((u64::from(self.number) + 1) << 20) | block as u64
    }
}

/// Builds the turns of one session.
struct Builder {
    block_size: u32,
    version: Option<Version>,
    /// The session's own ids of its boilerplate; known after its first prompt.
    boilerplate: Vec<u64>,
    /// The session's index, where its ids are local.
    session: Option<u32>,
    seconds_per_token: f64,
    turns: Vec<Turn>,
    agents: u32,
}

impl Builder {
    /// Adds an agent's requests and those of its sub-agents. Returns what waits for all of them has to wait for.
    fn agent(&mut self, agent: u32, entries: &[Object<'_>], start: &Fork, depth: u32) -> Result<Fork, TraceProblem> {
        let mut last = start.clone();
        // The ends of the sub-agents since the last request, until the next request joins them.
        let mut joined: Option<Fork> = None;
        for entry in entries {
            let kind: String = entry.required("type", KINDS)?;
            match kind.as_str() {
                "n" | "s" => {
                    last = self.request(agent, entry, &joined.take().unwrap_or(last))?;
                }
                "subagent" if depth < MAX_DEPTH => {
                    let end = self.sub_agent(entry, &last, depth)?;
                    if let Some(end) = end {
                        joined = Some(join(joined, end, last.base));
                    }
                }
                "subagent" => {
                    return Err(entry.wrong("type", &kind, &format!("at most {MAX_DEPTH} levels of sub-agents")));
                }
                _ => return Err(entry.wrong("type", &kind, KINDS)),
            }
        }
        Ok(joined.unwrap_or(last))
    }

    /// Adds one sub-agent, forked after `parent`. Nothing where it has no requests.
    fn sub_agent(&mut self, entry: &Object<'_>, parent: &Fork, depth: u32) -> Result<Option<Fork>, TraceProblem> {
        let requests = entry.objects("requests")?;
        if requests.is_empty() {
            return Ok(None);
        }
        let done = parent.base
            + entry
                .optional_not_negative("t", TIME)?
                .unwrap_or(parent.end - parent.base);
        let expected = "the sub-agent's time in milliseconds, at least 0";
        let duration = entry.optional_not_negative("duration_ms", expected)?.unwrap_or(0.0) / 1e3;
        // Where `t` less the duration falls before the fork, `t` cannot be when it was done: then it is the start.
        let base = if done - duration >= parent.end - START_TOLERANCE_S {
            done - duration
        } else {
            done
        };
        let agent = self.agents;
        self.agents += 1;
        let start = Fork {
            after: parent.after.clone(),
            end: parent.end,
            base: base.max(parent.end),
            exact: false,
        };
        Ok(Some(self.agent(agent, &requests, &start, depth + 1)?))
    }

    /// Adds one request that waits for `before`. Returns what waits for it.
    fn request(&mut self, agent: u32, entry: &Object<'_>, before: &Fork) -> Result<Fork, TraceProblem> {
        let time = match entry.optional_not_negative("t", TIME)? {
            Some(time) => before.base + time,
            None => entry.required("t", TIME)?,
        };
        let think_time = entry.optional_not_negative("think_time", "the client's time in seconds, at least 0")?;
        let gap = match think_time {
            Some(think_time) if before.exact => think_time,
            _ => (time - before.end).max(0.0),
        };
        let prompt_tokens = entry.required_positive("in", "a number of tokens, at least 1")?;
        let output_tokens: u32 = entry.required("out", OUTPUT)?;
        let api_time = api_time(entry)?;
        let index = u32::try_from(self.turns.len()).expect("a line of bounded length has fewer requests");
        let content = self.content(agent, entry, prompt_tokens)?.into();
        self.turns.push(Turn {
            agent,
            prompt_tokens,
            // A request samples at least one token, whatever was recorded.
            output_tokens: output_tokens.max(1),
            content,
            after: before.after.clone(),
            gap: Duration::try_from_secs_f64(gap).map_err(|_| entry.wrong("t", &gap.to_string(), TIME))?,
        });
        let service = api_time.unwrap_or(f64::from(output_tokens) * self.seconds_per_token);
        Ok(Fork {
            after: vec![index],
            end: time + service,
            base: before.base,
            exact: api_time.is_some(),
        })
    }

    /// The content ids of a request's whole blocks.
    fn content(&mut self, agent: u32, entry: &Object<'_>, prompt_tokens: u32) -> Result<Vec<u64>, TraceProblem> {
        let expected = "a list of block ids";
        let ids: Vec<u64> = entry.required("hash_ids", expected)?;
        let blocks = (prompt_tokens / self.block_size) as usize;
        if ids.len() != blocks {
            let expected = format!("{blocks} ids, one for each whole block of an `in` of {prompt_tokens}");
            return Err(entry.wrong("hash_ids", &format!("{} ids", ids.len()), &expected));
        }
        let Some(session) = self.session else { return Ok(ids) };
        let scope = if agent == 0 { Scope::Root } else { Scope::SubAgents };
        let version = self.version.filter(|_| agent == 0);
        if let Some(version) = version.filter(|_| self.boilerplate.is_empty()) {
            self.boilerplate = ids.iter().copied().take(version.blocks as usize).collect();
        }
        let unique = |(block, id): (usize, u64)| match version {
            Some(version) if self.boilerplate.get(block) == Some(&id) => Ok(version.id(block)),
            _ => local_id(session, scope, id).ok_or_else(|| entry.wrong("hash_ids", &id.to_string(), "ids below 2^39")),
        };
        ids.into_iter().enumerate().map(unique).collect()
    }
}

const KINDS: &str = "`n`, `s` or `subagent`";
const TIME: &str = "a time in seconds, at least 0";

/// Recorded times are rounded to seconds, so that a sub-agent may seem to start so much before its fork.
const START_TOLERANCE_S: f64 = 2.0;

/// What a request after several sub-agents waits for.
fn join(others: Option<Fork>, end: Fork, base: f64) -> Fork {
    let mut joined = others.unwrap_or_default();
    joined.after.extend(end.after);
    Fork {
        after: joined.after,
        end: joined.end.max(end.end),
        base,
        exact: false,
    }
}

#[cfg(test)]
mod tests {
    use crate::formats::{ReadOptions, read_trace, read_trace_with};
    use crate::trace::{Trace, TurnRef};
    use homing_units::Duration;

    fn read(lines: &str) -> Trace {
        let trace = read_trace("test", lines.as_bytes()).expect("a good trace");
        trace.check_invariants();
        trace
    }

    /// A line of one session with these requests, blocks of 4 tokens.
    fn line(id: &str, requests: &[&str]) -> String {
        let requests = requests.join(", ");
        format!(
            r#"{{"id": "{id}", "block_size": 4, "hash_id_scope": "local", "tool_tokens": 3, "requests": [{requests}]}}"#
        )
    }

    fn check_error(requests: &[&str], expected: &str) {
        let error = read_trace("test", line("a", requests).as_bytes()).expect_err("a broken session");
        assert_eq!(error.to_string(), expected, "for {requests:?}");
    }

    fn check_turns(requests: &[&str], expected: &[(u32, &[u32], u64)]) {
        let trace = read(&line("a", requests));
        let seen: Vec<(u32, &[u32], u64)> = trace.sessions[0]
            .turns
            .iter()
            .map(|turn| (turn.agent, turn.after.as_slice(), turn.gap.as_secs()))
            .collect();
        assert_eq!(seen, expected, "(agent, after, gap) for {requests:?}");
    }

    const FIRST: &str =
        r#"{"t": 0, "type": "s", "in": 9, "out": 3, "hash_ids": [1, 2], "api_time": 10, "think_time": 0}"#;

    #[test]
    fn a_turn_follows_the_one_before_after_its_gap() {
        let given = r#"{"t": 31, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4, "think_time": 20}"#;
        let derived = r#"{"t": 40, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4}"#;
        check_turns(&[FIRST, given, derived], &[(0, &[], 0), (0, &[0], 20), (0, &[1], 5)]);
    }

    #[test]
    fn after_an_unknown_service_time_the_gap_comes_from_the_recorded_times() {
        // 10 s for 3 tokens elsewhere: 6 tokens take 20 s, so the request at 30 s ended at 50 s.
        let unknown = r#"{"t": 30, "type": "s", "in": 9, "out": 6, "hash_ids": [1, 2], "think_time": 20}"#;
        let next = r#"{"t": 57, "type": "s", "in": 9, "out": 6, "hash_ids": [1, 2], "think_time": 47}"#;
        check_turns(&[FIRST, unknown, next], &[(0, &[], 0), (0, &[0], 20), (0, &[1], 7)]);
    }

    #[test]
    fn sub_agents_in_a_row_fork_and_the_next_turn_joins_them() {
        let sub = r#"{"t": 31, "duration_ms": 20000, "type": "subagent", "requests": [
            {"t": 0, "type": "n", "in": 4, "out": 1, "hash_ids": [1], "api_time": 5, "think_time": 0},
            {"t": 8, "type": "n", "in": 8, "out": 1, "hash_ids": [1, 9], "api_time": 5, "think_time": 3}]}"#
            .replace('\n', "");
        let other = r#"{"t": 22, "duration_ms": 11000, "type": "subagent", "requests": [
            {"t": 1, "type": "n", "in": 4, "out": 1, "hash_ids": [1], "api_time": 5, "think_time": 0}]}"#
            .replace('\n', "");
        let empty = r#"{"t": 22, "duration_ms": 11000, "type": "subagent", "requests": []}"#;
        let next = r#"{"t": 40, "type": "n", "in": 9, "out": 1, "hash_ids": [1, 2], "api_time": 4, "think_time": 30}"#;
        // Both started at 11 s, 1 s after the end of the first turn; the later one's last request ended at 24 s.
        let expected: &[(u32, &[u32], u64)] =
            &[(0, &[], 0), (1, &[0], 1), (1, &[1], 3), (2, &[0], 2), (0, &[2, 3], 16)];
        check_turns(&[FIRST, &sub, &other, empty, next], expected);
        check_turns(&[FIRST, empty, next], &[(0, &[], 0), (0, &[0], 30)]);
    }

    #[test]
    fn ids_are_local_to_a_session_and_a_sub_agents_ids_to_its_kind() {
        let sub =
            r#"{"t": 9, "type": "subagent", "requests": [{"t": 0, "type": "n", "in": 5, "out": 0, "hash_ids": [1]}]}"#;
        let trace = read(&format!("{}\n{}", line("a", &[FIRST, sub, sub]), line("b", &[FIRST])));
        let first_id = |session: usize, turn: usize| trace.sessions[session].turns[turn].content[0];
        assert_ne!(first_id(0, 0), first_id(1, 0), "two sessions");
        assert_ne!(first_id(0, 0), first_id(0, 1), "root and sub-agent");
        assert_eq!(
            first_id(0, 1),
            first_id(0, 2),
            "two sub-agents of a session share their boilerplate"
        );
        assert_eq!(
            trace.sessions[0].turns[1].output_tokens, 1,
            "no output counts as one token"
        );
        assert_eq!(trace.block_size, 4);
        let first = |turn: u32| trace.is_first_of_agent(TurnRef { session: 0, turn });
        assert_eq!(
            [first(0), first(1), first(2)],
            [true; 3],
            "one turn each of three agents"
        );
    }

    #[test]
    fn sessions_of_one_version_share_its_boilerplate() {
        let session = |id: &str, tools: u32, ids: [u64; 3]| {
            format!(
                r#"{{"id": "{id}", "block_size": 4, "tool_tokens": {tools}, "system_tokens": 2, "requests": [
                {{"t": 0, "type": "n", "in": 13, "out": 1, "hash_ids": [{0}, {1}, {2}]}},
                {{"t": 1, "type": "n", "in": 13, "out": 1, "hash_ids": [{0}, 90, {1}]}},
                {{"t": 2, "type": "subagent", "requests": [{{"t": 0, "type": "n", "in": 5, "out": 1, "hash_ids": [{0}]}}]}}]}}"#,
                ids[0], ids[1], ids[2]
            )
            .replace('\n', "")
        };
        let lines = [
            session("a", 7, [0, 1, 2]),
            session("b", 7, [5, 6, 7]),
            session("c", 9, [5, 6, 7]),
        ]
        .join("\n");
        let trace = read(&lines);
        let ids = |session: usize, turn: usize| &trace.sessions[session].turns[turn].content[..];
        assert_eq!(ids(0, 0)[..2], ids(1, 0)[..2], "9 tokens are two whole blocks");
        assert_ne!(ids(0, 0)[2], ids(1, 0)[2]);
        assert_ne!(ids(1, 0)[0], ids(2, 0)[0], "another version");
        assert_eq!(ids(0, 1)[0], ids(0, 0)[0]);
        assert!(
            !ids(0, 0).contains(&ids(0, 1)[2]),
            "a block elsewhere is no boilerplate"
        );
        assert_ne!(ids(0, 2)[0], ids(0, 0)[0], "sub-agents have their own");
        let options = ReadOptions {
            shared_boilerplate: false,
            ..ReadOptions::default()
        };
        let trace = read_trace_with("test", lines.as_bytes(), &options).expect("a good trace");
        let ids = |session: usize| &trace.sessions[session].turns[0].content;
        assert!(!ids(0).iter().any(|id| ids(1).contains(id)), "switched off");
    }

    #[test]
    fn broken_requests_name_their_field() {
        let request = |field: &str, value: &str| {
            FIRST.replacen(
                &format!("\"{field}\": "),
                &format!("\"{field}\": {value}, \"was\": "),
                1,
            )
        };
        check_error(&[], "line 1: field `requests` is `[]`, expected at least one request");
        check_error(
            &[FIRST, &request("in", "14")],
            "line 1: field `requests[1].hash_ids` is `2 ids`, expected 3 ids, one for each whole block of an `in` of 14",
        );
        check_error(
            &[&request("in", "-1")],
            "line 1: field `requests[0].in` is `-1`, expected a number of tokens, at least 1",
        );
        check_error(
            &[&request("type", "\"x\"")],
            "line 1: field `requests[0].type` is `x`, expected `n`, `s` or `subagent`",
        );
        check_error(
            &[&request("think_time", "-0.5")],
            "line 1: field `requests[0].think_time` is `-0.5`, expected the client's time in seconds, at least 0",
        );
        check_error(
            &[&request("t", "null")],
            "line 1: field `requests[0].t` is missing, expected a time in seconds, at least 0",
        );
        let far = "a time in seconds, at least 0";
        check_error(
            &[&request("t", "1e300")],
            &format!(
                "line 1: field `requests[0].t` is `1{}`, expected {far}",
                "0".repeat(39) + "…"
            ),
        );
    }

    #[test]
    fn sessions_must_agree_and_have_names_of_their_own() {
        let check = |second: &str, expected: &str| {
            let lines = format!("{}\n{second}", line("a", &[FIRST]));
            assert_eq!(
                read_trace("test", lines.as_bytes())
                    .expect_err("a broken trace")
                    .to_string(),
                expected
            );
        };
        check(
            &line("a", &[FIRST]),
            "line 2: field `id` is `a`, expected a name of its own: session 1 has it too",
        );
        check(
            &line("b", &[FIRST]).replace("\"block_size\": 4", "\"block_size\": 8"),
            "line 2: field `block_size` is `8`, expected 4, the block size of the lines before",
        );
        check(
            &line("b", &[FIRST]).replace("local", "everywhere"),
            "line 2: field `hash_id_scope` is `everywhere`, expected `local` or `global`",
        );
    }

    #[test]
    fn a_sub_agent_that_could_not_have_been_done_by_then_starts_then() {
        let sub = r#"{"t": 15, "duration_ms": 90000, "type": "subagent", "requests": [{"t": 0, "type": "n", "in": 5, "out": 0, "hash_ids": [1]}]}"#;
        let trace = read(&line("a", &[FIRST, sub]));
        assert_eq!(trace.sessions[0].turns[1].gap, Duration::from_secs(5));
    }
}
