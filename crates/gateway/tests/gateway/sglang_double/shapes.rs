//! The JSON that the double says: chunks, answers and errors of the three ways to ask, `/server_info` and metrics.

use super::jobs::{Finish, Job};
use super::{Mode, Server, cache};
use serde_json::{Value, json};

/// How a request was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Chat,
    Completions,
    /// SGLang's own `/generate`.
    Generate,
}

/// What an answer is made of.
pub struct Form<'a> {
    pub api: Api,
    pub body: &'a Value,
    pub rid: &'a str,
    pub prompt: &'a [u32],
    pub cache_report: bool,
}

impl Form<'_> {
    fn base(&self, object: &str, choices: Value) -> Value {
        // The model is the request's, whatever it is: SGLang does not look at it.
        let model = self.body["model"].as_str().unwrap_or("default");
        json!({"id": self.rid, "object": object, "created": 1_790_000_000, "model": model, "choices": choices})
    }

    /// The events that come before the first token.
    pub fn opening(&self) -> Vec<String> {
        match self.api {
            Api::Chat => vec![self.chat_chunk(
                json!({"reasoning_content": null, "role": "assistant", "content": ""}),
                None,
            )],
            Api::Completions | Api::Generate => Vec::new(),
        }
    }

    /// The event of a token; `last` is the finish that comes with it, if it is known already.
    pub fn token(&self, output: &[u32], cached: usize, last: Option<&Finish>) -> String {
        let token = output.last().copied().unwrap_or_default();
        match self.api {
            Api::Chat => self.chat_chunk(json!({"reasoning_content": null, "content": text(&[token])}), None),
            Api::Completions => {
                let mut choice = json!({"index": 0, "text": text(&[token]), "logprobs": null,
                    "finish_reason": last.map(|finish| finish.kind), "matched_stop": null});
                if self.body["return_token_ids"] == true {
                    choice["token_ids"] = json!([token]);
                    if output.len() == 1 {
                        choice["prompt_token_ids"] = json!(self.prompt);
                    }
                }
                event(&self.base("text_completion", json!([choice])))
            }
            Api::Generate => event(&self.whole_generate(output, cached, last)),
        }
    }

    /// The events that end a stream, without `[DONE]`.
    pub fn ending(&self, output: &[u32], finish: &Finish) -> Vec<String> {
        let mut events = Vec::new();
        if let Some(status) = finish.status {
            events.push(event(&stream_error(&finish.message, status)));
        } else if self.api == Api::Chat {
            events.push(self.chat_chunk(json!({"reasoning_content": null}), Some(finish.kind)));
        } else if finish.kind == "abort" || output.is_empty() {
            // Otherwise the last token's event said it.
            events.push(match self.api {
                Api::Completions => event(&self.base(
                    "text_completion",
                    json!([{"index": 0, "text": "", "logprobs": null, "finish_reason": finish.kind, "matched_stop": null}]),
                )),
                _ => event(&self.whole_generate(output, finish.cached, Some(finish))),
            });
        }
        if self.api != Api::Generate {
            events.extend(self.extensions(output, finish));
            if self.body["stream_options"]["include_usage"] == true {
                let object = if self.api == Api::Chat {
                    "chat.completion.chunk"
                } else {
                    "text_completion"
                };
                let mut chunk = self.base(object, json!([]));
                chunk["usage"] = self.usage(output.len(), finish.cached);
                events.push(event(&chunk));
            }
        }
        events
    }

    /// `sglext`: what only SGLang says, and in a chat's stream the only way to its tokens.
    fn extensions(&self, output: &[u32], finish: &Finish) -> Option<String> {
        let mut extension = serde_json::Map::new();
        if self.body["return_cached_tokens_details"] == true {
            let details = json!({"device": finish.cached, "host": 0});
            extension.insert("cached_tokens_details".to_owned(), details);
        }
        if self.api == Api::Chat && finish.status.is_none() {
            if self.body["return_input_ids_in_sglext"] == true {
                extension.insert("input_ids".to_owned(), json!(self.prompt));
            }
            if self.body["return_output_ids_in_sglext"] == true {
                extension.insert("output_ids".to_owned(), json!([output]));
            }
        }
        let object = if self.api == Api::Chat {
            "chat.completion.chunk"
        } else {
            "text_completion"
        };
        let mut chunk = self.base(object, json!([]));
        chunk["sglext"] = Value::Object(extension.clone());
        (!extension.is_empty()).then(|| event(&chunk))
    }

    /// The answer of a request without a stream.
    pub fn whole(&self, output: &[u32], finish: &Finish) -> Value {
        let mut answer = match self.api {
            Api::Generate => return self.whole_generate(output, finish.cached, Some(finish)),
            Api::Chat => {
                let message = json!({"role": "assistant", "content": text(output), "reasoning_content": null, "tool_calls": null});
                let mut choice = json!({"index": 0, "message": message, "logprobs": null, "finish_reason": finish.kind, "matched_stop": null});
                if self.body["return_token_ids"] == true {
                    choice["prompt_token_ids"] = json!(self.prompt);
                    choice["response_token_ids"] = json!(output);
                }
                self.base("chat.completion", json!([choice]))
            }
            Api::Completions => {
                let mut choice = json!({"index": 0, "text": text(output), "logprobs": null, "finish_reason": finish.kind, "matched_stop": null});
                if self.body["return_token_ids"] == true {
                    choice["prompt_token_ids"] = json!(self.prompt);
                    choice["token_ids"] = json!(output);
                }
                self.base("text_completion", json!([choice]))
            }
        };
        answer["usage"] = self.usage(output.len(), finish.cached);
        answer["metadata"] = json!({"weight_version": "default"});
        answer
    }

    fn whole_generate(&self, output: &[u32], cached: usize, finish: Option<&Finish>) -> Value {
        let finish_reason = finish.map(|finish| match finish.kind {
            "length" => json!({"type": "length", "length": output.len()}),
            kind => json!({"type": kind, "message": finish.message, "status_code": finish.status, "err_type": null}),
        });
        json!({"text": text(output), "output_ids": output, "meta_info": {"id": self.rid, "finish_reason": finish_reason,
            "prompt_tokens": self.prompt.len(), "weight_version": "default", "reasoning_tokens": 0,
            "completion_tokens": output.len(), "cached_tokens": cached}})
    }

    fn chat_chunk(&self, delta: Value, finish: Option<&str>) -> String {
        let choice =
            json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": finish, "matched_stop": null});
        event(&self.base("chat.completion.chunk", json!([choice])))
    }

    fn usage(&self, output: usize, cached: usize) -> Value {
        let details = self.cache_report.then(|| json!({"cached_tokens": cached}));
        json!({"prompt_tokens": self.prompt.len(), "total_tokens": self.prompt.len() + output, "completion_tokens": output,
            "prompt_tokens_details": details, "reasoning_tokens": 0, "completion_tokens_details": null})
    }
}

/// Tokens are bytes.
pub fn text(tokens: &[u32]) -> String {
    let letter = |token: &u32| char::from(u8::try_from(*token).expect("tokens of answers are letters"));
    tokens.iter().map(letter).collect()
}

fn event(data: &Value) -> String {
    format!("data: {data}\n\n")
}

/// The body of an error before the answer began (`ErrorResponse`, not nested as OpenAI's is).
pub fn error(message: &str, kind: &str, status: u16) -> Value {
    json!({"object": "error", "message": message, "type": kind, "param": null, "code": status})
}

/// The event of an error in a stream: nested, under the name of its status.
fn stream_error(message: &str, status: u16) -> Value {
    let kind = match status {
        400 => "BAD_REQUEST",
        503 => "SERVICE_UNAVAILABLE",
        _ => "INTERNAL_SERVER_ERROR",
    };
    json!({"error": error(message, kind, status)})
}

/// `/server_info`: the resolved arguments of the command line, the scheduler's figures, and where events come from.
pub fn server_info(server: &Server) -> Value {
    let spec = &server.spec;
    let events_config = server.event_ports.map(|(port, replay)| {
        let replay = replay.map(|port| format!("tcp://127.0.0.1:{port}"));
        json!({"publisher": "zmq", "endpoint": format!("tcp://*:{port}"), "topic": "", "replay_endpoint": replay})
            .to_string()
    });
    let method = if spec.mode == Mode::Prefill {
        "follow_bootstrap_room"
    } else {
        "round_robin"
    };
    let states: Vec<Value> = (0..spec.dp_size)
        .map(|_| json!({"last_gen_throughput": 0.0, "disaggregation_mode": spec.mode.name(),
            "memory_usage": {"token_capacity": spec.max_total_num_tokens}, "effective_max_running_requests_per_dp": 256}))
        .collect();
    let mut info = json!({
        "model_path": spec.model, "served_model_name": spec.model, "tokenizer_path": spec.model, "host": "127.0.0.1",
        "port": server.address.port(), "context_length": null, "page_size": spec.page_size, "tp_size": spec.dp_size,
        "dp_size": spec.dp_size, "enable_dp_attention": spec.dp_size > 1, "load_balance_method": method,
        "random_seed": server.seed, "disable_radix_cache": !spec.radix, "enable_hierarchical_cache": false,
        "enable_session_radix_cache": spec.session_radix, "enable_cache_report": spec.cache_report,
        "enable_metrics": spec.metrics, "kv_events_config": events_config, "disaggregation_mode": spec.mode.name(),
        "disaggregation_transfer_backend": "nixl", "disaggregation_bootstrap_port": server.bootstrap_port,
        "disaggregation_decode_enable_radix_cache": spec.mode == Mode::Decode && spec.radix,
        "disaggregation_decode_allocation_policy": "early", "launch_command": "python -m sglang.launch_server",
        "status": "ready", "max_total_num_tokens": spec.max_total_num_tokens,
        "max_req_input_len": spec.context_len - 6, "kv_events": kv_events(server),
        "startup_time": {"scheduler_e2e": 41.5, "tokenizer_e2e": 44.25}, "internal_states": states,
        "version": "0.5.23", "frontend": "python",
    });
    if spec.local_prefill {
        info["disaggregation_decode_enable_conditional_agg"] = json!(true);
    }
    info
}

/// `describe_kv_events_publisher`: it depends on the command line only, not on whether there is anything to tell.
fn kv_events(server: &Server) -> Value {
    let Some((port, replay)) = server.event_ports else {
        return Value::Null;
    };
    let mut events = json!({"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port, "topic": "",
        "block_size": server.spec.page_size, "dp_size": server.spec.dp_size});
    if let Some(port) = replay {
        events["replay_endpoint_port_base"] = json!(port);
    }
    events
}

/// The gauges that tell of load, one line a rank. A scrape of all processes has no `process_start_time_seconds`.
pub fn metrics(server: &Server) -> String {
    let engine = match server.spec.mode {
        Mode::Null => "unified",
        Mode::Prefill => "prefill",
        Mode::Decode => "decode",
    };
    let mut lines = String::new();
    let mut gauge = |name: &str, value: &dyn Fn(u32) -> f64| {
        lines += &format!("# HELP sglang:{name} {name}\n# TYPE sglang:{name} gauge\n");
        for rank in 0..server.spec.dp_size {
            let dp = if server.spec.dp_size > 1 {
                format!(",dp_rank=\"{rank}\"")
            } else {
                String::new()
            };
            let model = &server.spec.model;
            let labels = format!(
                "engine_type=\"{engine}\",model_name=\"{model}\",moe_ep_rank=\"0\",pp_rank=\"0\",tp_rank=\"{rank}\"{dp}"
            );
            lines += &format!("sglang:{name}{{{labels}}} {:?}\n", value(rank));
        }
    };
    let capacity = f64::from(server.spec.max_total_num_tokens);
    let running = |rank: u32| {
        let of = |job: &std::sync::Arc<Job>| job.rank == rank;
        server.running.lock().unwrap().values().filter(|job| of(job)).count() as f64
    };
    let used = |rank: u32| {
        let cache: &std::sync::Mutex<cache::Cache> = &server.caches[rank as usize];
        cache.lock().unwrap().tokens() as f64
    };
    gauge("num_running_reqs", &running);
    gauge("num_queue_reqs", &|_| 0.0);
    gauge("num_used_tokens", &used);
    gauge("token_usage", &|rank| used(rank) / capacity);
    gauge("cache_hit_rate", &|_| 0.0);
    gauge("max_total_num_tokens", &|_| capacity);
    gauge("page_size", &|_| f64::from(server.spec.page_size));
    gauge("context_len", &|_| f64::from(server.spec.context_len));
    if server.spec.mode == Mode::Prefill {
        gauge("num_prefill_bootstrap_queue_reqs", &running);
        gauge("num_prefill_inflight_queue_reqs", &|_| 0.0);
    }
    if server.spec.mode == Mode::Decode {
        gauge("num_decode_prealloc_queue_reqs", &|_| 0.0);
        gauge("num_decode_transfer_queue_reqs", &|_| 0.0);
    }
    lines
}
