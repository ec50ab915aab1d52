//! As much HTTP as it takes: one request, one page, the end.

use std::fmt::Write as _;

use crate::exposition;
use crate::source::{Source, Untold};

/// A request and all its header fields may have so many bytes.
pub(crate) const HEAD_BYTES_MAX: usize = 8 << 10;
const FIELDS_MAX: usize = 64;

/// The whole answer to a request that begins like this; `None` if more of it must come first.
pub(crate) fn respond(head: &[u8], source: &dyn Source) -> Option<Vec<u8>> {
    let error = |status| Some(Page::error(status, source).bytes());
    let mut fields = [httparse::EMPTY_HEADER; FIELDS_MAX];
    let mut request = httparse::Request::new(&mut fields);
    match request.parse(head) {
        Ok(status) if status.is_partial() && head.len() < HEAD_BYTES_MAX => return None,
        Ok(status) if status.is_partial() => return error(Status::TooLarge),
        Ok(_) => {}
        Err(httparse::Error::TooManyHeaders) => return error(Status::TooLarge),
        Err(_) => return error(Status::BadRequest),
    }
    let has_body = match request.method {
        Some("GET") => true,
        Some("HEAD") => false,
        _ => return error(Status::NotAllowed),
    };
    // A query means nothing here.
    let path = request.path.unwrap_or_default().split('?').next().unwrap_or_default();
    let told = match path {
        "/metrics" => source.open_metrics().map(|body| Page::new(exposition::CONTENT_TYPE, body)),
        "/stat" => source.json().map(|body| Page::new("application/json", body)),
        _ => Ok(Page::error(Status::NotFound, source)),
    };
    let page = told.unwrap_or_else(|untold| match untold {
        Untold::Gone(why) => Page::text(Status::Gone, format!("{why}\n")),
        Untold::Unspeakable => Page::error(Status::Internal, source),
    });
    Some(Page { has_body, ..page }.bytes())
}

#[derive(Clone, Copy)]
enum Status {
    Ok,
    BadRequest,
    NotFound,
    NotAllowed,
    Gone,
    TooLarge,
    Internal,
}

impl Status {
    const fn line(self) -> &'static str {
        match self {
            Self::Ok => "200 OK",
            Self::BadRequest => "400 Bad Request",
            Self::NotFound => "404 Not Found",
            Self::NotAllowed => "405 Method Not Allowed\r\nAllow: GET, HEAD",
            Self::Gone => "410 Gone",
            Self::TooLarge => "431 Request Header Fields Too Large",
            Self::Internal => "500 Internal Server Error",
        }
    }
}

struct Page {
    status: Status,
    content_type: &'static str,
    body: String,
    /// Else only its length is told.
    has_body: bool,
}

impl Page {
    const fn new(content_type: &'static str, body: String) -> Self {
        Self { status: Status::Ok, content_type, body, has_body: true }
    }

    const fn text(status: Status, body: String) -> Self {
        Self { status, content_type: "text/plain; charset=utf-8", body, has_body: true }
    }

    fn error(status: Status, source: &dyn Source) -> Self {
        let about = source.about();
        Self::text(status, format!("{about}: /metrics for Prometheus, /stat as JSON.\n"))
    }

    fn bytes(&self) -> Vec<u8> {
        let mut text = String::with_capacity(self.body.len() + 256);
        // Writing to a string can't fail.
        let _ = write!(
            text,
            "HTTP/1.1 {}\r\nContent-Type: {}\r\nContent-Length: {}\r\nCache-Control: no-store\r\n\
             Connection: close\r\n\r\n",
            self.status.line(),
            self.content_type,
            self.body.len()
        );
        if self.has_body {
            text += &self.body;
        }
        text.into_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Has figures, or had.
    struct Thing(Result<&'static str, Untold>);

    impl Source for Thing {
        fn about(&self) -> &str {
            "A thing's metrics"
        }

        fn open_metrics(&self) -> Result<String, Untold> {
            self.0.clone().map(str::to_owned)
        }

        fn json(&self) -> Result<String, Untold> {
            self.0.clone().map(|said| format!("{said:?}"))
        }
    }

    fn ask(head: &str, thing: &Thing) -> Option<String> {
        respond(head.as_bytes(), thing).map(|answer| String::from_utf8(answer).unwrap())
    }

    #[test]
    fn each_request_gets_its_answer() {
        let thing = Thing(Ok("figures"));
        let get = |path: &str| ask(&format!("GET {path} HTTP/1.1\r\n\r\n"), &thing).unwrap();
        assert!(get("/metrics").ends_with("\r\n\r\nfigures"));
        assert!(get("/stat?pretty").ends_with("\r\n\r\n\"figures\""));
        let other = get("/");
        assert!(other.starts_with("HTTP/1.1 404 ") && other.contains("A thing's metrics: /metr"));
        let head = ask("HEAD /metrics HTTP/1.0\r\n\r\n", &thing).unwrap();
        assert!(head.contains("Content-Length: 7\r\n") && head.ends_with("\r\n\r\n"));
        assert!(ask("POST /stat HTTP/1.1\r\n\r\n", &thing).unwrap().contains("Allow: GET, HEAD"));
        assert!(ask("what?\r\n\r\n", &thing).unwrap().starts_with("HTTP/1.1 400 "));
        assert_eq!(ask("", &thing), None);
        assert_eq!(ask("GET /stat HTTP/1.1\r\nHost: a\r\n", &thing), None);
        let long = format!("GET /stat HTTP/1.1\r\nCookie: {}", "x".repeat(HEAD_BYTES_MAX));
        assert!(ask(&long[..HEAD_BYTES_MAX], &thing).unwrap().starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn what_is_gone_says_so() {
        let thing = Thing(Err(Untold::Gone("the thing has been closed")));
        for path in ["/metrics", "/stat"] {
            let answer = ask(&format!("GET {path} HTTP/1.1\r\n\r\n"), &thing).unwrap();
            assert!(answer.starts_with("HTTP/1.1 410 Gone\r\n"), "{answer}");
            assert!(answer.ends_with("\r\n\r\nthe thing has been closed\n"), "{answer}");
        }
        let broken = ask("GET /stat HTTP/1.1\r\n\r\n", &Thing(Err(Untold::Unspeakable))).unwrap();
        assert!(broken.starts_with("HTTP/1.1 500 "), "{broken}");
    }
}
