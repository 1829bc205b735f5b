//! The turns of one coding-agent session: what each waits for, how long, and what its prompt contains.

use super::OUTPUT;
use super::boilerplate::Boilerplate;
use crate::content::{Scope, local_id};
use crate::formats::TraceProblem;
use crate::formats::fields::Object;
use crate::ids::share;
use crate::trace::Turn;
use homing_units::Duration;

/// Sub-agents may have sub-agents, but not without end.
const MAX_DEPTH: u32 = 16;

/// Builds the turns of one session.
pub(super) struct Builder {
    block_size: u32,
    /// The session's index, where its ids are local.
    session: Option<u32>,
    /// What of it other sessions share.
    boilerplate: Option<Boilerplate>,
    /// The session's own ids of that; known after its first prompt.
    own_boilerplate: Vec<u64>,
    seconds_per_token: f64,
    turns: Vec<Turn>,
    agents: u32,
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

impl Builder {
    /// Builds the session of this index (none where its ids mean the same in all sessions).
    pub(super) fn new(
        block_size: u32,
        session: Option<u32>,
        boilerplate: Option<Boilerplate>,
        requests: &[Object<'_>],
    ) -> Result<Self, TraceProblem> {
        Ok(Self {
            block_size,
            session,
            boilerplate,
            own_boilerplate: Vec::new(),
            seconds_per_token: seconds_per_token(requests)?,
            turns: Vec::new(),
            agents: 1,
        })
    }

    /// The turns of these requests; none where they are sub-agents without any.
    pub(super) fn turns(mut self, requests: &[Object<'_>]) -> Result<Vec<Turn>, TraceProblem> {
        self.agent(0, requests, &Fork::default(), 0)?;
        share(&mut self.turns);
        Ok(self.turns)
    }

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
        let done = parent.base + entry.optional_time("t", 1.0, TIME)?.unwrap_or(parent.end - parent.base);
        let expected = "the sub-agent's time in milliseconds, at least 0";
        let duration = entry.optional_time("duration_ms", 1e-3, expected)?.unwrap_or(0.0) / 1e3;
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
        let time = match entry.optional_time("t", 1.0, TIME)? {
            Some(time) => before.base + time,
            None => entry.required("t", TIME)?,
        };
        let think_time = entry.optional_time("think_time", 1.0, "the client's time in seconds, at least 0")?;
        let gap = match think_time {
            Some(think_time) if before.exact => think_time,
            _ => (time - before.end).max(0.0),
        };
        let prompt_tokens = entry.required_tokens("in", 1)?;
        let output_tokens = entry.required_tokens("out", 0)?;
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
        let ids = entry.ids("hash_ids")?;
        let blocks = (prompt_tokens / self.block_size) as usize;
        if ids.len() != blocks {
            let expected = format!("{blocks} ids, one for each whole block of an `in` of {prompt_tokens}");
            return Err(entry.wrong("hash_ids", &format!("{} ids", ids.len()), &expected));
        }
        let Some(session) = self.session else { return Ok(ids) };
        let scope = if agent == 0 { Scope::Root } else { Scope::SubAgents };
        let boilerplate = self.boilerplate.filter(|_| agent == 0);
        if let Some(boilerplate) = boilerplate.filter(|_| self.own_boilerplate.is_empty()) {
            self.own_boilerplate = ids.iter().copied().take(boilerplate.blocks()).collect();
        }
        let unique = |(block, id): (usize, u64)| match boilerplate {
            Some(boilerplate) if self.own_boilerplate.get(block) == Some(&id) => Ok(boilerplate.id(block)),
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

/// The server's seconds for each output token over the requests that say both; 0 where none does.
fn seconds_per_token(requests: &[Object<'_>]) -> Result<f64, TraceProblem> {
    let (mut seconds, mut tokens) = (0.0, 0.0);
    for request in requests {
        if let (Some(api_time), Some(out)) = (api_time(request)?, request.optional_tokens("out", OUTPUT)?) {
            seconds += api_time;
            tokens += f64::from(out);
        }
    }
    Ok(if tokens > 0.0 { seconds / tokens } else { 0.0 })
}

fn api_time(request: &Object<'_>) -> Result<Option<f64>, TraceProblem> {
    request.optional_time("api_time", 1.0, "the server's time in seconds, at least 0")
}
