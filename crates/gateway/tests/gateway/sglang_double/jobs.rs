//! What becomes of a request inside the double: the scheduler's side, by role.

use super::fabric::{Bootstrap, Failed, Kv, Room};
use super::{Mode, Server};
use crate::support::engine::next_token;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

/// What happens to a request instead of the usual.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Act {
    /// Answers with this status and SGLang's error body.
    Refuse(u16),
    /// The KV cannot be sent: both sides are told.
    FailTransfer,
    /// Cuts the connection after so many tokens.
    CutAfter(usize),
    /// Ends as if it had been aborted by its id after so many tokens: `finish_reason` is `abort`, the status 200.
    AbortAfter(usize),
    /// Takes the request and does nothing.
    Hang,
}

/// A request under way.
pub struct Job {
    pub rid: String,
    pub prompt: Vec<u32>,
    pub limit: usize,
    pub rank: u32,
    pub room: Option<u64>,
    pub host: Option<String>,
    pub port: Option<u16>,
    /// `disagg_prefill_dp_rank`.
    pub prefill_rank: Option<u32>,
    pub local_prefill: bool,
    pub act: Option<Act>,
    pub abort: CancellationToken,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// `length` or `abort`.
    pub kind: &'static str,
    pub message: String,
    /// With a status it is an error; an abort without one ends the answer as if all were well.
    pub status: Option<u16>,
    pub cached: usize,
}

/// What a request's client is told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// The cached tokens of the prompt are known from the first token on.
    Token {
        token: u32,
        cached: usize,
    },
    Finish(Finish),
    Cut,
}

impl Finish {
    fn length(cached: usize) -> Self {
        Self {
            kind: "length",
            message: String::new(),
            status: None,
            cached,
        }
    }

    fn error(status: u16, message: String) -> Self {
        Self {
            kind: "abort",
            message,
            status: Some(status),
            cached: 0,
        }
    }

    fn aborted(cached: usize) -> Self {
        Self {
            kind: "abort",
            message: "Aborted".to_owned(),
            status: None,
            cached,
        }
    }
}

pub type Steps = mpsc::Receiver<Step>;

/// Starts a request; it ends with the server's life, without a word.
pub fn start(server: &Arc<Server>, job: Job) -> Steps {
    let (sender, steps) = mpsc::channel(1);
    let (server, job) = (Arc::clone(server), Arc::new(job));
    server.running.lock().unwrap().insert(job.rid.clone(), Arc::clone(&job));
    server.log.changed.notify_waiters();
    tokio::spawn(async move {
        let work = Work {
            server: &server,
            job: &job,
            sender: &sender,
        };
        let hung_up = async {
            sender.closed().await;
            tokio::time::sleep(server.spec.waits.disconnect).await;
            if !job.abort.is_cancelled() {
                server.log.hung_up.fetch_add(1, Ordering::SeqCst);
                job.abort.cancel();
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = work.run() => {}
            () = hung_up => {}
            () = server.life.cancelled() => {}
        }
        server.running.lock().unwrap().remove(&job.rid);
        server.log.changed.notify_waiters();
    });
    steps
}

struct Work<'a> {
    server: &'a Arc<Server>,
    job: &'a Job,
    sender: &'a mpsc::Sender<Step>,
}

impl Work<'_> {
    async fn run(&self) {
        if self.job.act == Some(Act::Hang) {
            self.job.abort.cancelled().await;
            return self.finish(Finish::aborted(0)).await;
        }
        let is_local =
            self.server.spec.mode == Mode::Null || (self.job.local_prefill && self.server.spec.local_prefill);
        let Some(room) = self.job.room.filter(|_| !is_local) else {
            if is_local {
                let (content, cached) = self.prefill();
                return self.generate(content, None, cached).await;
            }
            let rid = &self.job.rid;
            let message =
                format!("Invalid request: Disaggregated request received without bootstrap room id. req.rid='{rid}'");
            return self.finish(Finish::error(400, message)).await;
        };
        let outcome = match self.server.spec.mode {
            Mode::Prefill => self.serve_prefill(room).await,
            _ => self.serve_decode(room).await,
        };
        if let Err(finish) = outcome {
            self.finish(finish).await;
        }
    }

    async fn finish(&self, finish: Finish) {
        drop(self.sender.send(Step::Finish(finish)).await);
    }

    /// The KV of the prompt's content from the cache and by computation, and how much of it was cached. The prompt is
    /// stored.
    fn prefill(&self) -> (Vec<u32>, usize) {
        let prompt = &self.job.prompt;
        let mut content = self.matched();
        let cached = content.len();
        content.extend(&prompt[content.len()..]);
        self.store(prompt, &content);
        (content, cached)
    }

    fn matched(&self) -> Vec<u32> {
        if !self.server.spec.radix {
            return Vec::new();
        }
        self.server.caches[self.job.rank as usize]
            .lock()
            .unwrap()
            .matched(&self.job.prompt)
    }

    fn store(&self, keys: &[u32], content: &[u32]) {
        if self.server.spec.radix {
            let changes = self.server.caches[self.job.rank as usize]
                .lock()
                .unwrap()
                .insert(keys, content);
            self.server.announce(self.job.rank, &changes);
        }
    }

    /// A prefill server: waits for the decode server, computes, sends, and then answers with its one token.
    async fn serve_prefill(&self, room: u64) -> Result<(), Finish> {
        let bootstrap = self.server.bootstrap.as_ref().expect("a prefill server has one");
        let failed = |stage: &str, reason: &str| {
            let rid = &self.job.rid;
            let text = format!(
                "Prefill {stage} failed for request rank=0 req.rid='{rid}' req.bootstrap_room={room} with exception \
                 KVTransferError(bootstrap_room={room}): {reason}"
            );
            Finish::error(500, text)
        };
        let implied = self.implied_rank(bootstrap, room);
        if self.job.rank != implied {
            let rank = self.job.rank;
            let reason = format!(
                "follow_bootstrap_room conflict: dispatched to dp_rank {rank} but bootstrap_room {room} implies dp_rank \
                 {implied}. Set SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 to allow mixed routing."
            );
            return Err(failed("bootstrap", &reason));
        }
        let Ok(meeting) = bootstrap.open_sender(self.job.rank, room) else {
            self.server
                .fault(format!("room {room} was used twice at once by prefill requests"));
            return Err(failed("bootstrap", "Duplicate or cancelled bootstrap room"));
        };
        let close = Close(bootstrap, self.job.rank, room);
        let arrived = tokio::select! {
            arrived = meeting.receiver(&self.server.spec.waits) => arrived,
            // Its own side only: a decode server that comes later waits for its own timeout (issue 28651).
            () = self.job.abort.cancelled() => return Err(failed("bootstrap", "Aborted by AbortReq.")),
        };
        if let Err(error) = arrived {
            let reason = match error {
                Failed::TimedOut => {
                    let waited = self.server.spec.waits.bootstrap.as_secs_f64();
                    format!("Request {room} timed out after {waited:.1}s in KVPoll.Bootstrapping")
                }
                _ => "Failed due to an unknown reason from another rank".to_owned(),
            };
            return Err(failed("bootstrap", &reason));
        }
        let (content, cached) = self.prefill();
        self.send(&meeting, content, cached)
            .await
            .map_err(|reason| failed("transfer", &reason))?;
        drop(close);
        Ok(())
    }

    /// The prefill server's rank that a room is at: the one that both legs are told, else by the room's number.
    fn implied_rank(&self, bootstrap: &Bootstrap, room: u64) -> u32 {
        let by_room = || u32::try_from(room % u64::from(bootstrap.dp_size)).expect("below the ranks");
        match (self.job.prefill_rank, self.server.spec.mode) {
            // A prefill server only looks whether it is told one.
            (Some(_), Mode::Prefill) => self.job.rank,
            (Some(rank), _) => rank,
            (None, _) => by_room(),
        }
    }

    async fn send(&self, meeting: &Room, content: Vec<u32>, cached: usize) -> Result<(), String> {
        let permit = tokio::select! {
            permit = self.server.transfers.acquire() => permit,
            () = meeting.given_up() => return Err("Failed due to an unknown reason from another rank".to_owned()),
            () = self.job.abort.cancelled() => {
                meeting.conclude(Err(None));
                return Err("Aborted by AbortReq.".to_owned());
            }
        };
        permit.expect("never closed").forget();
        if self.job.act == Some(Act::FailTransfer) {
            let reason = format!(
                "Failed to send kv chunk of {} to 127.0.0.1",
                self.job.room.unwrap_or_default()
            );
            meeting.conclude(Err(Some(reason.clone())));
            return Err(reason);
        }
        let first = next_token(&content);
        meeting.conclude(Ok(Kv { content, first, cached }));
        drop(self.sender.send(Step::Token { token: first, cached }).await);
        self.finish(Finish::length(cached)).await;
        Ok(())
    }

    /// A decode server: asks the prefill server for the KV that it lacks, waits, and goes on from it.
    async fn serve_decode(&self, room: u64) -> Result<(), Finish> {
        let peer = self.resolve(room).await?;
        let rank = self.implied_rank(&peer, room);
        let failed = |reason: &str| {
            let rid = &self.job.rid;
            let text = format!(
                "Decode transfer failed for request rank=0 decode_req.req.rid='{rid}' \
                 decode_req.req.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}): {reason}"
            );
            Finish::error(500, text)
        };
        let Ok(meeting) = peer.open_receiver(rank, room) else {
            self.server
                .fault(format!("room {room} was used twice at once by decode requests"));
            return Err(failed("Duplicate decode bootstrap room"));
        };
        let close = Close(&peer, rank, room);
        let own = self.matched();
        let kv = tokio::select! {
            kv = meeting.kv(&peer, &self.server.spec.waits) => kv,
            () = self.job.abort.cancelled() => {
                meeting.conclude(Err(None));
                return Err(failed("Aborted by AbortReq."));
            }
        };
        let kv = match kv {
            // Metadata of room 0 counts as not yet written: the request waits until it times out.
            Ok(_) if room == 0 => {
                tokio::time::sleep(self.server.spec.waits.waiting).await;
                return Err(failed("Request 0 timed out in KVPoll.WaitingForInput"));
            }
            Ok(kv) => kv,
            Err(error) => {
                meeting.conclude(Err(None));
                return Err(failed(&self.reason(error, room)));
            }
        };
        drop(close);
        let pages = |tokens: usize| tokens.div_ceil(self.server.spec.page_size as usize);
        if pages(kv.content.len()) != pages(self.job.prompt.len()) {
            let (theirs, ours) = (kv.content.len(), self.job.prompt.len());
            self.server
                .fault(format!("room {room}: P was sent {theirs} tokens, D {ours}"));
            return Err(failed("the page counts of the two sides differ"));
        }
        let kept = own.len().min(kv.content.len());
        let content = [&own[..kept], &kv.content[kept..]].concat();
        self.store(&self.job.prompt, &content[..self.job.prompt.len().min(content.len())]);
        self.generate(content, Some(kv.first), kv.cached.max(own.len())).await;
        Ok(())
    }

    fn reason(&self, error: Failed, room: u64) -> String {
        match error {
            Failed::TimedOut => {
                let waited = self.server.spec.waits.waiting.as_secs_f64();
                format!("Request {room} timed out after {waited:.1}s in KVPoll.WaitingForInput")
            }
            Failed::Told(Some(reason)) => reason,
            Failed::Told(None) => "Failed to get kvcache from prefill instance, it might be dead".to_owned(),
            Failed::PeerDied => {
                let address = self.peer_address().unwrap_or_default();
                format!("Lost connection with prefill instance (bootstrap_addr: {address})")
            }
        }
    }

    fn peer_address(&self) -> Option<String> {
        let port = self.job.port.unwrap_or(self.server.bootstrap_port);
        Some(format!("{}:{port}", self.job.host.as_ref()?))
    }

    async fn resolve(&self, room: u64) -> Result<Arc<Bootstrap>, Finish> {
        let failed = |reason: &str| {
            let rid = &self.job.rid;
            let text = format!(
                "Decode handshake failed for request rank=0 decode_req.req.rid='{rid}' \
                 decode_req.req.bootstrap_room={room} with exception KVTransferError(bootstrap_room={room}): {reason}"
            );
            Finish::error(500, text)
        };
        let Some(address) = self.peer_address() else {
            self.server.fault(format!(
                "room {room}: a decode request without `bootstrap_host` kills the scheduler"
            ));
            return Err(failed("no bootstrap host"));
        };
        let Some(peer) = self.server.fabric.find(&address) else {
            tokio::select! {
                () = tokio::time::sleep(self.server.spec.waits.resolve) => {}
                () = self.job.abort.cancelled() => {}
            }
            return Err(failed("Aborted by AbortReq."));
        };
        if peer.page_size != self.server.spec.page_size {
            self.server
                .fault("page sizes differ: the decode server's scheduler dies");
            return Err(failed("Page size mismatch"));
        }
        Ok(peer)
    }

    /// Generates from the content; the first token may be given.
    async fn generate(&self, content: Vec<u32>, first: Option<u32>, cached: usize) {
        let mut all = content;
        let mut keys = self.job.prompt.clone();
        let prompt = all.len();
        for index in 0..self.job.limit {
            match self.job.act {
                Some(Act::CutAfter(count)) if count == index => {
                    drop(self.sender.send(Step::Cut).await);
                    return;
                }
                Some(Act::AbortAfter(count)) if count == index => return self.finish(Finish::aborted(cached)).await,
                _ => {}
            }
            let permit = tokio::select! {
                permit = self.server.tokens.acquire() => permit,
                () = self.job.abort.cancelled() => return self.finish(Finish::aborted(cached)).await,
            };
            permit.expect("never closed").forget();
            let token = first.filter(|_| index == 0).unwrap_or_else(|| next_token(&all));
            all.push(token);
            keys.push(token);
            drop(self.sender.send(Step::Token { token, cached }).await);
        }
        // The last token's KV was never computed.
        let whole = keys.len().min(all.len()).saturating_sub(1);
        if all.len() > prompt {
            self.store(&keys[..whole], &all[..whole]);
        }
        self.finish(Finish::length(cached)).await;
    }
}

/// Closes a side of a room whatever becomes of it.
struct Close<'a>(&'a Bootstrap, u32, u64);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.close(self.1, self.2);
    }
}

/// A request's fields as the server reads them; an error is its 400.
pub fn read(server: &Server, body: &Value, headers: &::http::HeaderMap) -> Result<Job, String> {
    let prompt = super::http::prompt_of(server, body)?;
    if prompt.len() >= server.spec.context_len as usize {
        let (tokens, context) = (prompt.len(), server.spec.context_len);
        return Err(format!(
            "The input ({tokens} tokens) is longer than the model's context length ({context} tokens)."
        ));
    }
    let header = headers
        .get("x-data-parallel-rank")
        .and_then(|value| value.to_str().ok()?.parse().ok());
    let routed = header
        .or(body["routed_dp_rank"].as_u64())
        .or(body["data_parallel_rank"].as_u64());
    let dp_size = u64::from(server.spec.dp_size);
    if let Some(rank) = routed.filter(|rank| *rank >= dp_size) {
        return Err(format!("routed_dp_rank={rank} out of range [0, {dp_size})"));
    }
    let room = body["bootstrap_room"].as_u64();
    let rank = match (routed, server.spec.mode, room) {
        (Some(rank), ..) => rank,
        (None, Mode::Prefill, Some(room)) => room % dp_size,
        _ => server.next_rank.fetch_add(1, Ordering::SeqCst) as u64 % dp_size,
    };
    let rid = match body["rid"].as_str() {
        Some(rid) => rid.to_owned(),
        None => format!("{:032x}", server.next_rid()),
    };
    if server.running.lock().unwrap().contains_key(&rid) {
        return Err(format!("Duplicate request ID detected: {rid}"));
    }
    let limit = ["max_completion_tokens", "max_tokens"]
        .iter()
        .find_map(|name| body[name].as_u64());
    let limit = limit
        .or(body["sampling_params"]["max_new_tokens"].as_u64())
        .unwrap_or(16);
    // `PrefillBootstrapQueue._process_req`.
    let limit = if server.spec.mode == Mode::Prefill { 1 } else { limit };
    Ok(Job {
        rid,
        prompt,
        limit: usize::try_from(limit).expect("small"),
        rank: u32::try_from(rank).expect("below the ranks"),
        room,
        host: body["bootstrap_host"].as_str().map(str::to_owned),
        port: body["bootstrap_port"]
            .as_u64()
            .and_then(|port| u16::try_from(port).ok()),
        prefill_rank: body["disagg_prefill_dp_rank"]
            .as_u64()
            .and_then(|rank| u32::try_from(rank).ok()),
        local_prefill: body["do_local_prefill"] == true,
        act: server.log.acts.lock().unwrap().pop_front(),
        abort: CancellationToken::new(),
    })
}
