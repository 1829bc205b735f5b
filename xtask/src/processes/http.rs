//! The simplest HTTP client there is: one connection a request, blocking, with a time limit for each read.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

/// How long nothing may come.
const SILENCE: Duration = Duration::from_secs(180);

/// A response of which the head was read.
pub struct Response {
    pub status: u16,
    chunked: bool,
    reader: BufReader<TcpStream>,
}

/// How a streamed completion ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// With the mark of a whole answer.
    Done,
    /// With an error that says what it is.
    Typed(String),
    /// With nothing that says why.
    Lost(String),
}

/// Posts JSON and reads the head of the answer.
pub fn post(address: SocketAddr, path: &str, session: &str, body: &Value) -> Result<Response> {
    let body = body.to_string();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         x-homing-session: {session}\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    send(address, &[head.as_bytes(), body.as_bytes()].concat())
}

/// Status and body of a page.
pub fn get(address: SocketAddr, path: &str) -> Result<(u16, String)> {
    let head = format!("GET {path} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\n\r\n");
    let mut response = send(address, head.as_bytes())?;
    Ok((response.status, response.body()?))
}

/// A page of JSON.
pub fn json(address: SocketAddr, path: &str) -> Result<Value> {
    let (status, text) = get(address, path)?;
    ensure!(status == 200, "`{path}` answered {status}: {text}");
    serde_json::from_str(&text).with_context(|| format!("`{path}` is no JSON"))
}

fn send(address: SocketAddr, request: &[u8]) -> Result<Response> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.write_all(request)?;
    let mut reader = BufReader::new(stream);
    let status = line(&mut reader)?;
    let status = status.split(' ').nth(1).and_then(|code| code.parse().ok());
    let mut chunked = false;
    loop {
        let header = line(&mut reader)?.to_ascii_lowercase();
        if header.is_empty() {
            break;
        }
        chunked |= header.starts_with("transfer-encoding:") && header.contains("chunked");
    }
    Ok(Response {
        status: status.context("the answer has no status line")?,
        chunked,
        reader,
    })
}

fn line(reader: &mut BufReader<TcpStream>) -> Result<String> {
    let mut line = String::new();
    ensure!(reader.read_line(&mut line)? > 0, "the connection was closed");
    Ok(line.trim_end().to_owned())
}

impl Response {
    /// The next bytes of the body; `None` at its end.
    fn chunk(&mut self) -> Result<Option<Vec<u8>>> {
        if !self.chunked {
            let mut rest = Vec::new();
            self.reader.read_to_end(&mut rest)?;
            return Ok((!rest.is_empty()).then_some(rest));
        }
        let size = usize::from_str_radix(&line(&mut self.reader)?, 16).context("a chunk has no size")?;
        let mut bytes = vec![0; size];
        self.reader.read_exact(&mut bytes)?;
        line(&mut self.reader)
            .map(drop)
            .or_else(|error| if size == 0 { Ok(()) } else { Err(error) })?;
        Ok((size > 0).then_some(bytes))
    }

    /// All of the body.
    pub fn body(&mut self) -> Result<String> {
        let mut all = Vec::new();
        while let Some(bytes) = self.chunk()? {
            all.extend(bytes);
        }
        String::from_utf8(all).context("the body is no text")
    }

    /// Reads a streamed completion to its end: its text, and how it ended. `token` is called for each piece of text and
    /// says whether to go on; an answer that was left is done.
    pub fn completion(mut self, mut token: impl FnMut(&str) -> bool) -> (String, End) {
        let mut text = String::new();
        if self.status != 200 {
            let body = self.body().unwrap_or_default();
            return (text, refusal(self.status, &body));
        }
        let mut pending = String::new();
        loop {
            match self.chunk() {
                Ok(Some(bytes)) => pending.push_str(&String::from_utf8_lossy(&bytes)),
                Ok(None) => return (text, End::Lost("the stream ended without its mark".to_owned())),
                Err(error) => return (text, End::Lost(format!("{error:#}"))),
            }
            while let Some((event, rest)) = pending.split_once("\n\n") {
                let event = event.to_owned();
                pending = rest.to_owned();
                match take(&event) {
                    Ok(Some(piece)) => {
                        text.push_str(&piece);
                        if !token(&piece) {
                            return (text, End::Done);
                        }
                    }
                    Ok(None) => {}
                    Err(end) => return (text, end),
                }
            }
        }
    }
}

/// The text of an event, or the end that it is.
fn take(event: &str) -> Result<Option<String>, End> {
    let Some(data) = event.lines().find_map(|line| line.strip_prefix("data: ")) else {
        return Ok(None);
    };
    if data == "[DONE]" {
        return Err(End::Done);
    }
    let Ok(value) = serde_json::from_str::<Value>(data) else {
        return Err(End::Lost(format!("no JSON: {data}")));
    };
    match error_code(&value) {
        Some(code) => Err(End::Typed(code)),
        None => Ok(value["choices"][0]["text"].as_str().map(str::to_owned)),
    }
}

fn refusal(status: u16, body: &str) -> End {
    let code = serde_json::from_str(body).ok().and_then(|value| error_code(&value));
    match code {
        Some(code) => End::Typed(code),
        None => End::Lost(format!("status {status}: {body}")),
    }
}

/// The code of an error of ours.
fn error_code(value: &Value) -> Option<String> {
    let error = value.get("error").filter(|error| !error.is_null())?;
    let code = error["code"].as_str().or_else(|| error["type"].as_str());
    code.map(str::to_owned)
}

/// The sum of a metric over its labels.
pub fn metric(address: SocketAddr, name: &str) -> Result<f64> {
    let (_, text) = get(address, "/metrics")?;
    let of = |line: &&str| line.strip_prefix(name).is_some_and(|rest| rest.starts_with(['{', ' ']));
    let values: Vec<f64> = text
        .lines()
        .filter(of)
        .filter_map(|line| line.rsplit(' ').next()?.parse().ok())
        .collect();
    if values.is_empty() {
        bail!("no metric `{name}`");
    }
    Ok(values.into_iter().sum())
}
