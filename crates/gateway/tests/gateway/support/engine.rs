//! A scripted engine over loopback that speaks vLLM's dialect: tokens are bytes, the next one follows from all before it,
//! so that an answer that is continued elsewhere can be told from one that is not.

use axum::body::Body;
use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use homing_model::{ChatInput, Vocabulary};
use http::{HeaderMap, StatusCode, header};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::{Notify, Semaphore};
use tokio::task::JoinHandle;

/// How long a test waits for something that must happen, on the busiest machine.
pub const PATIENCE: Duration = Duration::from_secs(120);
pub const MODEL: &str = "fake";
pub const CONTEXT: u32 = 8_192;

/// What an engine does with its next request of a kind.
#[derive(Clone, Debug)]
pub enum Act {
    /// Answers with this status and an error body.
    Refuse(u16),
    /// Cuts the connection after so many tokens.
    CutAfter(usize),
    /// Sends an error event after so many tokens.
    ErrorAfter(usize),
    /// Cuts the connection after the last token, without a word that it was the last.
    NoEnd,
    /// Cuts the connection after the last token, which says that it is the last.
    NoMark,
    /// Never answers.
    Hang,
    /// Answers a prefill without parameters.
    NoParams,
    /// Answers a prefill, and cannot be reached by whoever wants the KV.
    Unreachable,
    /// Says these choices, chunk by chunk, and ends.
    Say(Vec<Value>),
}

/// A request as it arrived.
#[derive(Clone, Debug)]
pub struct Seen {
    pub path: String,
    pub body: Value,
    pub text: String,
    pub headers: HeaderMap,
}

impl Seen {
    pub fn is_prefill(&self) -> bool {
        self.body["kv_transfer_params"]["do_remote_decode"] == true
    }
}

#[derive(Default)]
pub struct Engine {
    seen: Mutex<Vec<Seen>>,
    prefill_acts: Mutex<VecDeque<Act>>,
    decode_acts: Mutex<VecDeque<Act>>,
    /// Requests whose connection is open.
    open: AtomicUsize,
    exports: AtomicU64,
    /// Connections that were ever made.
    connections: AtomicUsize,
    /// The start time that its metrics say, in seconds.
    born: AtomicU64,
    sick: AtomicBool,
    silent_about_tokens: AtomicBool,
    /// Another model than the one that all serve.
    model: Mutex<Option<String>>,
    caches_nothing: AtomicBool,
    /// Puts a token before every conversation that nobody else knows of.
    renders_oddly: AtomicBool,
    changed: Notify,
}

/// A fake engine that runs.
pub struct Fake {
    pub address: SocketAddr,
    pub engine: Arc<Engine>,
    /// A permit for each token that may be generated.
    pub tokens: Arc<Semaphore>,
    server: Option<JoinHandle<()>>,
}

#[derive(Clone)]
struct App {
    address: SocketAddr,
    engine: Arc<Engine>,
    tokens: Arc<Semaphore>,
    vocabulary: Vocabulary,
}

impl Fake {
    pub async fn start() -> Self {
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), Arc::new(Engine::default())).await
    }

    async fn start_at(address: SocketAddr, engine: Arc<Engine>) -> Self {
        let listener = TcpListener::bind(address).await.expect("the address is free");
        let address = listener.local_addr().unwrap();
        engine.born.fetch_add(1_700_000_000, Ordering::SeqCst);
        let tokens = Arc::new(Semaphore::new(Semaphore::MAX_PERMITS / 2));
        let app = App {
            address,
            engine: Arc::clone(&engine),
            tokens: Arc::clone(&tokens),
            vocabulary: Vocabulary::tiny(),
        };
        let server = Some(tokio::spawn(serve(listener, app)));
        Self {
            address,
            engine,
            tokens,
            server,
        }
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Ends it as a crash does: all connections break.
    pub async fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.abort();
            drop(server.await);
        }
    }

    /// Starts it again at the same address, as another life.
    pub async fn revive(&mut self) {
        self.kill().await;
        *self = Self::start_at(self.address, Arc::clone(&self.engine)).await;
    }

    /// Lets tokens out only one by one.
    pub fn hold(&self) {
        self.tokens.forget_permits(usize::MAX);
    }

    pub fn release(&self, tokens: usize) {
        self.tokens.add_permits(tokens);
    }

    pub fn on_prefill(&self, act: Act) {
        self.engine.prefill_acts.lock().unwrap().push_back(act);
    }

    pub fn on_decode(&self, act: Act) {
        self.engine.decode_acts.lock().unwrap().push_back(act);
    }

    /// Whether it answers its probes.
    pub fn set_sick(&self, sick: bool) {
        self.engine.sick.store(sick, Ordering::SeqCst);
    }

    /// An engine that knows nothing of `return_token_ids`.
    pub fn keep_tokens_secret(&self) {
        self.engine.silent_about_tokens.store(true, Ordering::SeqCst);
    }

    /// An engine whose chat template is another one than the router's.
    pub fn render_oddly(&self) {
        self.engine.renders_oddly.store(true, Ordering::SeqCst);
    }

    /// An engine that serves another model.
    pub fn serve(&self, model: &str) {
        *self.engine.model.lock().unwrap() = Some(model.to_owned());
    }

    /// An engine that was started without prefix caching.
    pub fn cache_nothing(&self, nothing: bool) {
        self.engine.caches_nothing.store(nothing, Ordering::SeqCst);
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.engine.seen.lock().unwrap().clone()
    }

    pub fn prefills(&self) -> Vec<Seen> {
        self.seen().into_iter().filter(Seen::is_prefill).collect()
    }

    pub fn decodes(&self) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| !seen.is_prefill()).collect()
    }

    /// Starts an engine whose chat template is another one than the router's.
    pub async fn start_odd() -> Self {
        let engine = Arc::new(Engine::default());
        engine.renders_oddly.store(true, Ordering::SeqCst);
        Self::start_at(SocketAddr::from(([127, 0, 0, 1], 0)), engine).await
    }

    /// Waits until the engine is in a state.
    pub async fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) {
        let seen = || format!("seen {} requests, {} open", self.seen().len(), self.open());
        super::until(&self.engine.changed, what, || holds(self), seen).await;
    }

    pub fn connections(&self) -> usize {
        self.engine.connections.load(Ordering::SeqCst)
    }

    pub fn open(&self) -> usize {
        self.engine.open.load(Ordering::SeqCst)
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        if let Some(server) = &self.server {
            server.abort();
        }
    }
}

/// Like `axum::serve`, but its connections end with it.
async fn serve(listener: TcpListener, app: App) {
    let routes = Router::new()
        .route("/v1/chat/completions", post(generate))
        .route("/v1/completions", post(generate))
        .route("/v1/messages", post(speak_anthropic))
        .route("/tokenize", post(tokenize))
        .route("/v1/models", get(models))
        .route("/health", get(health))
        .route("/metrics", get(metrics))
        .with_state(app.clone());
    let mut connections = tokio::task::JoinSet::new();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            continue;
        };
        stream.set_nodelay(true).unwrap();
        app.engine.connections.fetch_add(1, Ordering::SeqCst);
        let service = TowerToHyperService::new(routes.clone());
        connections.spawn(async move {
            let connection = hyper::server::conn::http1::Builder::new();
            drop(connection.serve_connection(TokioIo::new(stream), service).await);
        });
        while connections.try_join_next().is_some() {}
    }
}

async fn health(State(app): State<App>) -> StatusCode {
    if app.engine.sick.load(Ordering::SeqCst) {
        StatusCode::SERVICE_UNAVAILABLE
    } else {
        StatusCode::OK
    }
}

async fn models(State(app): State<App>) -> Json<Value> {
    let model = app.engine.model.lock().unwrap().clone();
    let model = model.unwrap_or_else(|| MODEL.to_owned());
    Json(json!({"object": "list", "data": [{"id": model, "object": "model", "max_model_len": CONTEXT}]}))
}

async fn metrics(State(app): State<App>) -> String {
    let born = app.engine.born.load(Ordering::SeqCst);
    // As Python writes it.
    let caching = match app.engine.caches_nothing.load(Ordering::SeqCst) {
        true => "False",
        false => "True",
    };
    format!(
        "process_start_time_seconds {born}\nvllm:num_requests_running 0\nvllm:num_requests_waiting 0\n\
         vllm:kv_cache_usage_perc 0.0\nvllm:cache_config_info{{enable_prefix_caching=\"{caching}\",block_size=\"16\",num_gpu_blocks=\"4096\"}} 1\n"
    )
}

async fn tokenize(State(app): State<App>, body: Bytes) -> Json<Value> {
    let tokens = prompt_of(&app, &serde_json::from_slice(&body).unwrap());
    Json(json!({"count": tokens.len(), "max_model_len": CONTEXT, "tokens": tokens}))
}

fn prompt_of(app: &App, body: &Value) -> Vec<u32> {
    let encode = |text: &str| app.vocabulary.tokenizer.encode(text);
    match (&body["prompt"], &body["messages"]) {
        (Value::String(text), _) => encode(text),
        (Value::Array(ids), _) => ids
            .iter()
            .map(|id| u32::try_from(id.as_u64().unwrap()).unwrap())
            .collect(),
        (_, messages) => {
            let tools = body.get("tools");
            let input = ChatInput {
                messages,
                tools,
                add_generation_prompt: true,
                unix_seconds: 0,
            };
            let odd = app.engine.renders_oddly.load(Ordering::SeqCst).then_some(0);
            odd.into_iter()
                .chain(app.vocabulary.encode_chat(&input).unwrap())
                .collect()
        }
    }
}

/// The token that follows: a small letter, decided by everything before.
pub fn next_token(tokens: &[u32]) -> u32 {
    let hash = tokens.iter().fold(17_u64, |hash, token| {
        (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3)
    });
    u32::from(b'a') + u32::try_from((hash >> 20) % 26).unwrap()
}

/// What a single engine would answer.
pub fn answer_to(prompt: &[u32], tokens: usize) -> String {
    let mut all = prompt.to_vec();
    for _ in 0..tokens {
        all.push(next_token(&all));
    }
    all[prompt.len()..]
        .iter()
        .map(|token| char::from(u8::try_from(*token).unwrap()))
        .collect()
}

/// Counts an open request down when its connection goes.
struct Open(Arc<Engine>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.open.fetch_sub(1, Ordering::SeqCst);
        self.0.changed.notify_waiters();
    }
}

async fn generate(State(app): State<App>, uri: http::Uri, headers: HeaderMap, body: Bytes) -> Response {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let seen = Seen {
        path: uri.path().to_owned(),
        body: serde_json::from_str(&text).unwrap(),
        text,
        headers,
    };
    let prefill = seen.is_prefill();
    app.engine.open.fetch_add(1, Ordering::SeqCst);
    let open = Open(Arc::clone(&app.engine));
    app.engine.seen.lock().unwrap().push(seen.clone());
    app.engine.changed.notify_waiters();
    let acts = if prefill {
        &app.engine.prefill_acts
    } else {
        &app.engine.decode_acts
    };
    let act = acts.lock().unwrap().pop_front();
    match act {
        Some(Act::Refuse(status)) => {
            let error = json!({"error": {"message": "scripted", "type": "x", "param": null, "code": status}});
            (StatusCode::from_u16(status).unwrap(), Json(error)).into_response()
        }
        Some(Act::Hang) => std::future::pending().await,
        act if prefill => prefilled(&app, &seen, act.as_ref()).await.into_response(),
        act => match pull(&app, &seen).await {
            Err(response) => response,
            Ok(()) if seen.body["stream"] == false => {
                json_with(prompt_of(&app, &seen.body).len(), None).into_response()
            }
            Ok(()) => streamed(app, seen, act, open),
        },
    }
}

/// The events that an engine with Anthropic's API says, whatever it is asked.
pub const ANTHROPIC: [&str; 5] = [
    r#"{"type":"message_start","message":{"id":"msg_e","usage":{"input_tokens":9,"output_tokens":0}}}"#,
    r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#,
    r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"hi  \u00e9"}}"#,
    r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":{"output_tokens":2,"cache_read_input_tokens":5}}"#,
    r#"{"type":"message_stop"}"#,
];

/// An engine that has Anthropic's API; it may break off after so many events.
async fn speak_anthropic(State(app): State<App>, headers: HeaderMap, body: Bytes) -> Response {
    let text = String::from_utf8(body.to_vec()).unwrap();
    let seen = Seen {
        path: "/v1/messages".to_owned(),
        body: serde_json::from_str(&text).unwrap(),
        text,
        headers,
    };
    app.engine.seen.lock().unwrap().push(seen);
    let act = app.engine.decode_acts.lock().unwrap().pop_front();
    let (count, is_cut) = match act {
        Some(Act::CutAfter(count)) => (count, true),
        _ => (ANTHROPIC.len(), false),
    };
    let event = |data: &&str| {
        let name: Value = serde_json::from_str(data).unwrap();
        Ok(format!("event: {}\ndata: {data}\n\n", name["type"].as_str().unwrap()))
    };
    let mut events: Vec<Result<String, std::io::Error>> = ANTHROPIC[..count].iter().map(event).collect();
    events.push(match is_cut {
        true => Err(std::io::Error::other("cut")),
        false => Ok("data: [DONE]\n\n".to_owned()),
    });
    // What has been said is sent before what comes next, so that a cut does not take it back.
    let said = futures::stream::unfold(events.into_iter(), async |mut events| {
        tokio::task::yield_now().await;
        Some((events.next()?, events))
    });
    let body = Body::from_stream(said);
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

async fn prefilled(app: &App, seen: &Seen, act: Option<&Act>) -> Json<Value> {
    let prompt = prompt_of(app, &seen.body);
    assert_eq!(seen.body["max_tokens"], 1);
    assert_eq!(seen.body["stream"], false);
    let export = app.engine.exports.fetch_add(1, Ordering::SeqCst);
    let mut port = app.address.port();
    if matches!(act, Some(Act::Unreachable)) {
        // An address that was free a moment ago: nobody listens there.
        let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
        port = nobody.local_addr().unwrap().port();
    }
    let params = json!({"do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[export]],
        "remote_num_tokens": prompt.len(), "remote_request_id": format!("export-{export}"), "odd": 1.50,
        "remote_host": "127.0.0.1", "remote_port": port, "of_prompt": next_token(&prompt)});
    json_with(prompt.len(), (!matches!(act, Some(Act::NoParams))).then_some(params))
}

/// What vLLM does with parameters: with those of another prompt it dies or answers from the wrong KV, which is asserted here
/// instead; where the source cannot be reached it answers 500.
async fn pull(app: &App, seen: &Seen) -> Result<(), Response> {
    let params = &seen.body["kv_transfer_params"];
    if params["do_remote_prefill"] != true {
        return Ok(());
    }
    let prompt = prompt_of(app, &seen.body);
    assert_eq!(
        params["remote_num_tokens"],
        prompt.len(),
        "the engine is dead: {params}"
    );
    assert_eq!(
        params["of_prompt"],
        next_token(&prompt),
        "the KV of another prompt: {params}"
    );
    let port = u16::try_from(params["remote_port"].as_u64().unwrap()).unwrap();
    match tokio::net::TcpStream::connect(("127.0.0.1", port)).await {
        Ok(_) => Ok(()),
        Err(_) => {
            let error = json!({"error": {"message": "kv load failed", "type": "x", "param": null, "code": 500}});
            Err((StatusCode::INTERNAL_SERVER_ERROR, Json(error)).into_response())
        }
    }
}

fn json_with(prompt: usize, params: Option<Value>) -> Json<Value> {
    Json(
        json!({"id": "cmpl-p", "object": "text_completion", "created": 1, "model": MODEL, "choices":
        [{"index": 0, "text": "x", "finish_reason": "length"}], "kv_transfer_params": params,
        "usage": {"prompt_tokens": prompt, "completion_tokens": 1, "total_tokens": prompt + 1}}),
    )
}

fn streamed(app: App, seen: Seen, act: Option<Act>, open: Open) -> Response {
    assert_eq!(seen.body["stream"], true);
    let (sender, receiver) = tokio::sync::mpsc::channel::<Result<String, std::io::Error>>(1);
    tokio::spawn(async move {
        tokio::select! {
            () = produce(&app, &seen, act, &sender) => {}
            () = sender.closed() => {}
        }
        drop(open);
    });
    let stream = futures::stream::unfold(receiver, async |mut receiver| Some((receiver.recv().await?, receiver)));
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(stream)).into_response()
}

type Sender = tokio::sync::mpsc::Sender<Result<String, std::io::Error>>;

/// An answer under way.
struct Answering<'a> {
    app: &'a App,
    seen: &'a Seen,
    act: Option<Act>,
    sender: &'a Sender,
    chat: bool,
}

async fn produce(app: &App, seen: &Seen, act: Option<Act>, sender: &Sender) {
    let chat = seen.path.ends_with("chat/completions");
    let answering = Answering {
        app,
        seen,
        act,
        sender,
        chat,
    };
    let prompt = prompt_of(app, &seen.body);
    if let Some(output) = answering.tokens(&prompt).await {
        answering.end(prompt.len(), output).await;
    }
}

impl Answering<'_> {
    /// Sends the tokens; says how many, where the answer ends as it should.
    async fn tokens(&self, prompt: &[u32]) -> Option<usize> {
        if self.chat {
            let role = json!({"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": null});
            let mut chunk = self.chunk(json!([role]));
            if self.says_tokens() {
                chunk["prompt_token_ids"] = json!(prompt);
            }
            self.send(&chunk).await;
        }
        let wanted = ["max_completion_tokens", "max_tokens"];
        let limit = wanted
            .iter()
            .find_map(|name| self.seen.body[name].as_u64())
            .unwrap_or(16);
        let limit = usize::try_from(limit).unwrap();
        let mut tokens = prompt.to_vec();
        if let Some(Act::Say(choices)) = &self.act {
            for choice in choices {
                self.send(&self.chunk(json!([choice]))).await;
            }
            return Some(choices.len());
        }
        for index in 0..limit {
            match self.act {
                Some(Act::CutAfter(count)) if count == index => {
                    self.cut().await;
                    return None;
                }
                Some(Act::ErrorAfter(count)) if count == index => {
                    self.send(&json!({"error": {"message": "scripted", "type": "x", "code": 500}}))
                        .await;
                    return None;
                }
                _ => {}
            }
            self.app.tokens.acquire().await.unwrap().forget();
            tokens.push(next_token(&tokens));
            let choice = self.choice(
                tokens[tokens.len() - 1],
                index + 1 == limit && !matches!(self.act, Some(Act::NoEnd)),
            );
            self.send(&self.chunk(json!([choice]))).await;
        }
        if matches!(self.act, Some(Act::NoEnd | Act::NoMark)) {
            self.cut().await;
            return None;
        }
        Some(limit)
    }

    fn choice(&self, token: u32, last: bool) -> Value {
        let text = char::from(u8::try_from(token).unwrap()).to_string();
        let finish = last.then_some("length");
        let mut choice = if self.chat {
            json!({"index": 0, "delta": {"content": text}, "finish_reason": finish})
        } else {
            json!({"index": 0, "text": text, "finish_reason": finish})
        };
        if self.says_tokens() {
            choice["token_ids"] = json!([token]);
        }
        choice
    }

    fn says_tokens(&self) -> bool {
        self.seen.body["return_token_ids"] == true && !self.app.engine.silent_about_tokens.load(Ordering::SeqCst)
    }

    async fn end(&self, prompt: usize, output: usize) {
        if self.seen.body["stream_options"]["include_usage"] == true {
            let mut last = self.chunk(json!([]));
            last["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": output,
                "total_tokens": prompt + output, "prompt_tokens_details": {"cached_tokens": 3}});
            self.send(&last).await;
        }
        drop(self.sender.send(Ok("data: [DONE]\n\n".to_owned())).await);
        // The end of the body comes later than its last event, as from servers that send them one by one.
        for _ in 0..1_000 {
            tokio::task::yield_now().await;
        }
    }

    fn chunk(&self, choices: Value) -> Value {
        let (kind, object) = match self.chat {
            true => ("chatcmpl", "chat.completion.chunk"),
            false => ("cmpl", "text_completion"),
        };
        let id = format!("{kind}-{}", self.seen.headers["x-request-id"].to_str().unwrap());
        json!({"id": id, "object": object, "created": 7, "model": MODEL, "choices": choices})
    }

    async fn send(&self, data: &Value) {
        drop(self.sender.send(Ok(format!("data: {data}\n\n"))).await);
    }

    async fn cut(&self) {
        drop(self.sender.send(Err(std::io::Error::other("cut"))).await);
    }
}

impl Fake {
    pub fn forget_acts(&self) {
        self.engine.prefill_acts.lock().unwrap().clear();
        self.engine.decode_acts.lock().unwrap().clear();
    }
}
