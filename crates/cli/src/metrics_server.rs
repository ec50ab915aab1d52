//! Metrics over HTTP, for this machine only: `/metrics` for Prometheus, `/stat` as JSON, and
//! `/healthz` for a watchdog.
//!
//! It serves targets and open volumes alike. The library provides a [`StatSource`]; this
//! server reads it in a thread of its own at each request.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use riopipe_metrics::{AddressError, StatError, StatSource, check_address, exposition};
use riopipe_net::{HostPort, ListenError, Listener};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use crate::failure::{Code, Failure};

/// The time for a client, from its connection to the last byte of the answer. It is only for
/// clients that hang: a busy machine must not exceed it.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// Largest number of clients at a time. A new one replaces the oldest, which has had time for its
/// request while as many others came.
const CLIENTS_MAX: usize = 16;
/// Largest length of a request with all its header fields in bytes; hyper accepts no smaller limit.
const HEAD_BYTES_MAX: usize = 8 << 10;
/// The pause after a failure to accept a connection, when descriptors are exhausted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The reason why metrics can't be served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetricsError {
    /// The address is not one for metrics.
    #[error("metrics: {0}; {advice}", advice = .0.advice())]
    Address(AddressError),
    /// The address can't be listened on.
    #[error("metrics: {0}")]
    Listen(#[from] ListenError),
    /// No thread or no descriptor is left.
    #[error("metrics: cannot serve: {0}; allow more open files (`ulimit -n`) or threads")]
    Start(#[from] std::io::Error),
}

impl MetricsError {
    /// The failure that the program ends with.
    pub(crate) fn into_failure(self) -> Failure {
        let code = match self {
            Self::Address(_) => Code::Usage,
            Self::Listen(_) | Self::Start(_) => Code::Media,
        };
        Failure::new(code, self.to_string())
    }
}

/// An address that is listened on and not served yet: clients wait.
pub(crate) struct MetricsAddress(Listener);

impl MetricsAddress {
    /// Listens on `address`, which must be a loopback address. Without a port it is
    /// `default_port`; port 0 takes a free one.
    pub(crate) fn take(address: &str, default_port: u16) -> Result<Self, MetricsError> {
        let senseless = |_| MetricsError::Address(AddressError::Senseless(address.to_owned()));
        let address: HostPort = address.parse().map_err(senseless)?;
        let address = address.with_port(default_port);
        check_address(&address).map_err(MetricsError::Address)?;
        Ok(Self(Listener::bind(&address)?))
    }

    /// Serves the metrics of `source`.
    pub(crate) fn serve(self, source: Arc<dyn StatSource>) -> Result<MetricsServer, MetricsError> {
        self.serve_with_timeout(source, CLIENT_TIMEOUT)
    }

    fn serve_with_timeout(
        self,
        source: Arc<dyn StatSource>,
        limit: Duration,
    ) -> Result<MetricsServer, MetricsError> {
        let address = self.0.local_addr();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let listener = {
            let _inside = runtime.enter();
            TcpListener::from_std(self.0.into_std())?
        };
        let (stop, stopped) = oneshot::channel();
        let accepting = accept(listener, source, limit);
        let thread = std::thread::Builder::new().name("metrics".into()).spawn(move || {
            runtime.spawn(accepting);
            // An error is the sender's drop, which is the signal. All tasks end with the runtime.
            let _ = runtime.block_on(stopped);
        })?;
        Ok(MetricsServer { address, stop: Some(stop), thread: Some(thread) })
    }
}

/// Serves metrics until it is dropped, in one thread, which sleeps until a request comes.
pub(crate) struct MetricsServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl MetricsServer {
    /// Its address, with the real port.
    pub(crate) const fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        // A dropped sender is the signal; the runtime ends with its thread, and its clients with it.
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the thread for metrics panicked");
        }
    }
}

async fn accept(listener: TcpListener, source: Arc<dyn StatSource>, limit: Duration) {
    let mut clients: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                clients.retain(|client| !client.is_finished());
                if clients.len() == CLIENTS_MAX
                    && let Some(oldest) = clients.pop_front()
                {
                    tracing::debug!("a client asked for metrics too slowly");
                    oldest.abort();
                }
                let client = tokio::spawn(serve(stream, Arc::clone(&source), limit));
                clients.push_back(client.abort_handle());
            }
            Err(error) => {
                tracing::warn!(%error, "metrics: cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Answers one request.
async fn serve(stream: TcpStream, source: Arc<dyn StatSource>, limit: Duration) {
    let answer = service_fn(move |request: Request<Incoming>| {
        let response = respond(request.method(), request.uri().path(), source.as_ref());
        async move { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .keep_alive(false)
        .title_case_headers(true)
        .max_buf_size(HEAD_BYTES_MAX)
        .serve_connection(TokioIo::new(stream), answer);
    match tokio::time::timeout(limit, connection).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(%error, "a client asked for metrics and left"),
        Err(_) => tracing::debug!("a client asked for metrics too slowly"),
    }
}

type Page = Response<Full<Bytes>>;

/// The answer to a request for `path`. hyper omits the body if the method has none.
fn respond(method: &Method, path: &str, source: &dyn StatSource) -> Page {
    let help = |status| {
        let about = source.about();
        text(status, format!("{about}: /metrics for Prometheus, /stat as JSON, /healthz.\n"))
    };
    if !matches!(*method, Method::GET | Method::HEAD) {
        let mut page = help(StatusCode::METHOD_NOT_ALLOWED);
        page.headers_mut().insert(ALLOW, HeaderValue::from_static("GET, HEAD"));
        return page;
    }
    let page_or_error = match path {
        "/metrics" => {
            source.open_metrics().map(|body| page(StatusCode::OK, exposition::CONTENT_TYPE, body))
        }
        "/stat" => source.json().map(|body| page(StatusCode::OK, "application/json", body)),
        "/healthz" => source.health().map(|()| text(StatusCode::OK, "ok\n".into())),
        _ => Ok(help(StatusCode::NOT_FOUND)),
    };
    page_or_error.unwrap_or_else(|error| match error {
        StatError::Gone(why) => text(StatusCode::GONE, format!("{why}\n")),
        StatError::Unhealthy(why) => text(StatusCode::SERVICE_UNAVAILABLE, format!("{why}\n")),
        StatError::Encoding => help(StatusCode::INTERNAL_SERVER_ERROR),
    })
}

fn text(status: StatusCode, body: String) -> Page {
    page(status, "text/plain; charset=utf-8", body)
}

fn page(status: StatusCode, content_type: &'static str, body: String) -> Page {
    let mut page = Response::new(Full::new(Bytes::from(body)));
    *page.status_mut() = status;
    page.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    page.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    page
}

#[cfg(test)]
mod tests;
